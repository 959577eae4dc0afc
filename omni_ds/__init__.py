"""Multimodal LLM training on DeepSpeed: encoders and LLM share every GPU, each with its own parallelism."""

__version__ = "0.1.0"
