"""Code that is copied into an exported folder and run from there with `trust_remote_code=True`.

It imports torch, numpy and transformers only, never this package.
"""
