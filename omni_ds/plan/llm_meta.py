"""The LLM in numbers, from a plain dict of its HF config: parameters and FLOPs of layers, embedding and head.

FLOPs count a multiply-add as two. A decoder layer's forward on a packed sequence with lengths n_i costs
2 x (matrix parameters) x sum(n_i) + 2 x 2 x heads x head_dim x sum(n_i^2) / 2 (scores and values, causal
half); PaLM (arXiv 2204.02311, appendix B) has the same count. Of a mixture of experts, a token pays for the
router and the experts it is sent to, but all of them have to be held. Backward costs twice the forward: once
the gradient of the inputs, once that of the weights; frozen weights have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from omni_ds.errors import UserError

# Decoders of multimodal models, which are not models of their own: their name in config.json's text_config.
INSIDE = (
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "qwen2_5_omni_text",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
    "qwen3_omni_moe_text",
)
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma3_text", *INSIDE)
# Their attention is Qwen3's: norms of queries and keys, attention_bias for all four matrices.
_QWEN3_MOE = ("qwen3_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text")
_QWEN3 = ("qwen3", "qwen3_vl_text", "gemma3_text", *_QWEN3_MOE)
# defaults of transformers that do not follow from other sizes
_HEAD_DIM = {"qwen3": 128, "qwen3_vl_text": 128, "gemma3_text": 256}
# transformers' Qwen2 has biases on q, k, v whatever the config says, its Mixtral has none
_ATTENTION_BIAS = {
    "qwen2": True,
    "mixtral": False,
    "qwen2_vl_text": True,
    "qwen2_5_vl_text": True,
    "qwen2_5_omni_text": True,
}
_SLIDING = ("mistral", "mixtral", "gemma3_text")  # families whose sliding_window needs no use_sliding_window


def moe_layer_indices(hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Decoder layers whose MLP is a mixture of experts: all of Mixtral's; of Qwen3's MoE every
    ``decoder_sparse_step``-th, without ``mlp_only_layers``; none of other families."""
    family, layers = hf_config.get("model_type"), range(int(hf_config.get("num_hidden_layers") or 0))
    if family == "mixtral":
        return tuple(layers)
    if family not in _QWEN3_MOE:
        return ()
    step, dense = hf_config.get("decoder_sparse_step", 1), hf_config.get("mlp_only_layers") or ()
    return tuple(index for index in layers if index not in dense and (index + 1) % step == 0)


def check_expert_degree(experts: int, size: int) -> None:
    """UserError unless ``size`` ranks can hold the same number of a layer's ``experts`` each."""
    if size > 1 and not experts:
        raise UserError(
            f"expert_parallel.autoep_size: {size}, but the LLM has no experts; use 1, or a Mixtral or "
            "Qwen3-MoE model"
        )
    if size > 1 and experts % size:
        fits = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        raise UserError(
            f"expert_parallel.autoep_size: {size} ranks do not divide the {experts} experts of a layer; "
            f"use one of {fits}"
        )


@dataclass(frozen=True)
class LLMMeta:
    """Sizes of a decoder of the Llama shape.

    window: sliding-window length in tokens of all layers but full_layers, 0 = none. norms: of the hidden
    width, in a layer.
    intermediate: width of dense MLPs; moe_layers: indices of the layers that have ``experts`` experts of
    width ``moe_intermediate`` instead, ``experts_per_token`` of which compute a token.
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
    norms: int = 2
    window: int = 0
    full_layers: tuple[int, ...] = ()
    model_type: str = "llama"
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    moe_layers: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, hf_config: Mapping[str, Any], trainable: bool = True) -> LLMMeta:
        """Read an HF config; UserError when its family is not supported or a size is missing."""
        family = hf_config.get("model_type")
        if family not in SUPPORTED:
            alone = ", ".join(name for name in SUPPORTED if name not in INSIDE)
            raise UserError(f"omni.llm: model_type {family!r} is not supported; use one of {alone}")

        def size(key: str, default: int | None = None) -> int:
            value = hf_config.get(key)
            value = default if value is None else value
            if value is None:
                raise UserError(f"omni.llm: the {family} config has no {key}; add it")
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"omni.llm: {key} is {value!r}; it must be a positive integer")
            return value

        hidden, heads = size("hidden_size"), size("num_attention_heads")
        head_dim = size("head_dim", _HEAD_DIM.get(family, hidden // heads))
        windowed = hf_config.get("use_sliding_window", family in _SLIDING)
        window = int(hf_config.get("sliding_window") or 0) if windowed else 0
        types = hf_config.get("layer_types") or ()
        moe_layers = moe_layer_indices(hf_config)
        experts: dict[str, Any] = {}
        if moe_layers:
            # transformers writes num_local_experts for both families, Qwen's own files say num_experts
            key = "num_experts" if hf_config.get("num_local_experts") is None else "num_local_experts"
            experts = {
                "experts": size(key),
                "experts_per_token": size("num_experts_per_tok"),
                "moe_intermediate": size(
                    "intermediate_size" if family == "mixtral" else "moe_intermediate_size"
                ),
                "moe_layers": moe_layers,
            }
            if experts["experts_per_token"] > experts["experts"]:
                raise UserError(
                    f"omni.llm: num_experts_per_tok is {experts['experts_per_token']}, but there are "
                    f"{experts['experts']} experts; lower it"
                )
        attention_bias = bool(hf_config.get("attention_bias", False))
        return cls(
            hidden=hidden,
            layers=size("num_hidden_layers"),
            heads=heads,
            kv_heads=size("num_key_value_heads", heads),
            head_dim=head_dim,
            intermediate=size("intermediate_size"),
            vocab=size("vocab_size"),
            tied=bool(hf_config.get("tie_word_embeddings", False)),
            trainable=trainable,
            qkv_bias=_ATTENTION_BIAS.get(family, attention_bias),
            out_bias=attention_bias and family in ("llama", *_QWEN3),
            mlp_bias=bool(hf_config.get("mlp_bias", False)) and family == "llama",
            qk_norm=family in _QWEN3,
            norms=4 if family == "gemma3_text" else 2,
            window=window,
            full_layers=tuple(i for i, kind in enumerate(types) if window and kind != "sliding_attention"),
            model_type=family,
            **experts,
        )

    @cached_property
    def _query(self) -> int:
        return self.heads * self.head_dim

    @property
    def _key_value(self) -> int:
        return self.kv_heads * self.head_dim

    @cached_property
    def _attention_matrices(self) -> int:
        return self.hidden * (2 * self._query + 2 * self._key_value)

    @cached_property
    def layer_matrices(self) -> int:
        """Matrix parameters that a token meets in a decoder layer: q, k, v, o and the gated MLP; on average
        where dense layers and experts mix."""
        return self._mean(self.matrices_of_layer)

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of a decoder layer: matrices, biases, norms, q and k norms; on average where
        dense layers and experts mix."""
        return self._mean(self.parameters_of_layer)

    def _mean(self, of_layer: Callable[[int], int]) -> int:
        if len(self.moe_layers) in (0, self.layers):
            return of_layer(0)
        return sum(map(of_layer, range(self.layers))) // self.layers

    def matrices_of_layer(self, index: int) -> int:
        """Matrix parameters that a token meets in one layer: attention and its MLP, or router and the
        experts it is sent to."""
        if index in self.moe_layers:
            mlp = self.experts * self.hidden + self.experts_per_token * self._expert_parameters
        else:
            mlp = 3 * self.hidden * self.intermediate
        return self._attention_matrices + mlp

    @property
    def _expert_parameters(self) -> int:
        return 3 * self.hidden * self.moe_intermediate

    def expert_parameters_of_layer(self, index: int) -> int:
        """Parameters of all experts of one layer: what expert parallelism divides."""
        return self.experts * self._expert_parameters if index in self.moe_layers else 0

    def parameters_of_layer(self, index: int) -> int:
        """Parameters of one decoder layer, all experts included."""
        biases = (self._query + 2 * self._key_value) * self.qkv_bias + self.hidden * self.out_bias
        biases += (2 * self.intermediate + self.hidden) * self.mlp_bias
        vectors = biases + self.norms * self.hidden + 2 * self.head_dim * self.qk_norm
        if index in self.moe_layers:
            router = self.experts * self.hidden
            return self._attention_matrices + router + self.expert_parameters_of_layer(index) + vectors
        return self.matrices_of_layer(index) + vectors

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
        return sum(map(self.parameters_of_layer, range(self.layers))) + embedding + self.hidden

    def layer_flops(self, lengths: Iterable[int], index: int | None = None) -> int:
        """Forward of one decoder layer (``index``; None: the average one) on a packed sequence of documents
        with these lengths."""
        matrices = self.layer_matrices if index is None else self.matrices_of_layer(index)
        tokens = pairs = near = 0
        window = self.window
        for n in lengths:
            tokens += n
            pairs += n * n
            # a triangle, then a band of the window's width
            near += window * (2 * n - window) if window and n > window else n * n
        full = len(self.full_layers) if index is None else index in self.full_layers
        layers = self.layers if index is None else 1
        return 2 * matrices * tokens + 2 * self._query * (full * pairs + (layers - full) * near) // layers

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
