"""Decides where and when everything runs, from numbers alone: no torch, no process group, no global state."""
