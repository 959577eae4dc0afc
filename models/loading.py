"""Fill the modules of a part: from its checkpoint where it has one, freshly drawn otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from models.encoders.base import Encoder
from models.weights import PartWeights, check_weights, fill_module, llm_weights, tower_weights

_VOCABULARY = ("llm.model.embed_tokens.weight", "llm.lm_head.weight")


class _Recorded:
    """A checkpoint's weights that remember dtypes and grow the vocabulary.

    Rows that the checkpoint lacks (placeholders added to the tokenizer) are the mean of those it has;
    feature rows take their place in the input and no target names them.
    """

    def __init__(self, weights: PartWeights, vocabulary: int | None = None):
        self._weights, self._vocabulary = weights, vocabulary
        self.dtypes: dict[str, torch.dtype] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)

    def read(self, name: str, index: Any = None) -> Tensor | None:
        value = self._weights.read(name, index)
        if value is None:
            return None
        self.dtypes[name] = value.dtype
        grows = self._vocabulary is not None and name in _VOCABULARY and value.shape[0] < self._vocabulary
        if grows:
            mean = value.float().mean(0, keepdim=True).to(value.dtype)
            value = torch.cat([value, mean.expand(self._vocabulary - value.shape[0], -1)])
        return value


def load_llm(
    modules: Iterable[nn.Module], part: Any, config: PreTrainedConfig, seed: int
) -> dict[str, torch.dtype]:
    """Fill this stage's layers.

    Args:
        modules: layers with ``hf_names()``; parameters may be on the meta device.
        part: ``omni_ds.config.PartConfig`` of the LLM.
        config: its HF config; a larger ``vocab_size`` than the checkpoint's grows embedding and head.
        seed: of fresh weights.

    Returns:
        The checkpoint's dtype of each parameter, by global name; empty for fresh weights.

    Raises:
        UserError: weights are missing, unexpected or of another shape; the message lists them.
    """
    sources = [_Recorded(llm_weights(part.path, config), config.vocab_size)] if part.path else []
    for module in modules:
        fill_module(module, module.hf_names(), sources, seed, std=config.initializer_range)
    check_weights(sources)
    return {name: dtype for source in sources for name, dtype in source.dtypes.items()}


def load_encoder(encoder: Encoder, part: Any, config: PreTrainedConfig, seed: int) -> dict[str, torch.dtype]:
    """Fill an encoder: its tower from ``part.path`` if given, its projector freshly. See :func:`load_llm`."""
    sources = [_Recorded(tower_weights(encoder.name, part.path, config, encoder.config))] if part.path else []
    fill_module(encoder, encoder.hf_names(), sources, seed)
    check_weights(sources)
    return {name: dtype for source in sources for name, dtype in source.dtypes.items()}
