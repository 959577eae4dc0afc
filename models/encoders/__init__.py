"""Encoders: towers of HF classes on packed items, with their projectors."""

from models.encoders.base import Encoder
from models.encoders.runtime import RuntimeEncoders, build_encoder

__all__ = ["Encoder", "RuntimeEncoders", "build_encoder"]
