"""Emulation: the real step executor, process groups and messages, with compute replaced by sleeping.

Many ranks fit on a small machine, and overlap is measured instead of computed.
"""
