"""The LLM in numbers, from a plain dict of its HF config: parameters and FLOPs of layers, embedding and head.

FLOPs count a multiply-add as two. A decoder layer's forward on a packed sequence with lengths n_i costs
2 x (matrix parameters) x sum(n_i) + 2 x 2 x heads x head_dim x sum(n_i^2) / 2 (scores and values, causal
half); PaLM (arXiv 2204.02311, appendix B) has the same count. Backward costs twice the forward: once the
gradient of the inputs, once that of the weights; frozen weights have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from omni_ds.errors import UserError

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
_ATTENTION_BIAS = {"qwen2": True}  # transformers' Qwen2 has biases on q, k, v whatever the config says
_TIED_DEFAULT = {"llama": False, "mistral": False, "qwen2": False, "qwen3": False}


@dataclass(frozen=True)
class LLMMeta:
    """Sizes of a decoder of the Llama shape.

    window: sliding-window length in tokens of the layers listed in windowed_layers (a count), 0 = none.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    trainable: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int = 0
    model_type: str = "llama"

    @classmethod
    def from_config(cls, hf_config: Mapping[str, Any], trainable: bool = True) -> LLMMeta:
        """Read an HF config; UserError when its family is not supported or a size is missing."""
        family = hf_config.get("model_type")
        if family not in SUPPORTED:
            raise UserError(
                f"omni.llm: model_type {family!r} is not supported; use one of {', '.join(SUPPORTED)}"
            )

        def size(key: str, default: int | None = None) -> int:
            value = hf_config.get(key)
            value = default if value is None else value
            if value is None:
                raise UserError(f"omni.llm: the {family} config has no {key}; add it")
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"omni.llm: {key} is {value!r}; it must be a positive integer")
            return value

        hidden, heads = size("hidden_size"), size("num_attention_heads")
        head_dim = size("head_dim", 128 if family == "qwen3" else hidden // heads)
        windowed = hf_config.get("use_sliding_window", family == "mistral")
        attention_bias = bool(hf_config.get("attention_bias", False))
        return cls(
            hidden=hidden,
            layers=size("num_hidden_layers"),
            heads=heads,
            kv_heads=size("num_key_value_heads", heads),
            head_dim=head_dim,
            intermediate=size("intermediate_size"),
            vocab=size("vocab_size"),
            tied=bool(hf_config.get("tie_word_embeddings", _TIED_DEFAULT[family])),
            trainable=trainable,
            qkv_bias=_ATTENTION_BIAS.get(family, attention_bias),
            out_bias=attention_bias and family in ("llama", "qwen3"),
            mlp_bias=bool(hf_config.get("mlp_bias", False)) and family == "llama",
            qk_norm=family == "qwen3",
            window=int(hf_config.get("sliding_window") or 0) if windowed else 0,
            model_type=family,
        )

    @cached_property
    def _query(self) -> int:
        return self.heads * self.head_dim

    @property
    def _key_value(self) -> int:
        return self.kv_heads * self.head_dim

    @cached_property
    def layer_matrices(self) -> int:
        """Matrix parameters of a decoder layer: q, k, v, o and the gated MLP."""
        attention = self.hidden * (2 * self._query + 2 * self._key_value)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """Parameters of a decoder layer: matrices, biases, two norms, q and k norms."""
        biases = (self._query + 2 * self._key_value) * self.qkv_bias + self.hidden * self.out_bias
        biases += (2 * self.intermediate + self.hidden) * self.mlp_bias
        return self.layer_matrices + biases + 2 * self.hidden + 2 * self.head_dim * self.qk_norm

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def head_parameters(self) -> int:
        """Final norm and vocabulary head; a tied head still has to be held where the last stage is."""
        return self.hidden + self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole LLM; a tied matrix counts once."""
        embedding = self.embedding_parameters * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embedding + self.hidden

    def layer_flops(self, lengths: Iterable[int]) -> int:
        """Forward of one decoder layer on a packed sequence of documents with these lengths."""
        tokens = pairs = 0
        window = self.window
        for n in lengths:
            tokens += n
            if window and n > window:  # a triangle, then a band of the window's width
                pairs += window * window + 2 * (n - window) * window
            else:
                pairs += n * n
        return 2 * self.layer_matrices * tokens + 2 * self._query * pairs

    def head_flops(self, target_tokens: int) -> int:
        """Forward of the vocabulary head on the target rows alone."""
        return 2 * self.hidden * self.vocab * target_tokens

    def sample_flops(self, tokens: int, target_tokens: int) -> int:
        """Forward of one sample through the whole LLM: what balancing compares."""
        if self.window and tokens > self.window:
            return self.layers * self.layer_flops((tokens,)) + self.head_flops(target_tokens)
        # The same, written out: asked for every sample of every step.
        layer = 2 * tokens * (self.layer_matrices + self._query * tokens)
        return self.layers * layer + 2 * self.hidden * self.vocab * target_tokens
