"""Encoders: towers of HF classes on packed items, with their projectors."""

from models.encoders.base import Encoder, ItemSlice
from models.encoders.runtime import RuntimeEncoders, build_encoder

__all__ = ["Encoder", "ItemSlice", "RuntimeEncoders", "build_encoder"]
