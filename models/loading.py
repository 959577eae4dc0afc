"""Fill the modules of a part: from its checkpoint where it has one, freshly drawn otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from models.encoders.base import Encoder
from models.multimodal import Multimodal
from models.weights import (
    PartWeights,
    check_weights,
    fill_module,
    find_weights,
    llm_weights,
    tower_weights,
)

_BLOCK = 4096
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

    def shape(self, name: str) -> tuple[int, ...] | None:
        shape = self._weights.shape(name)
        return (self._vocabulary, *shape[1:]) if self._grows(name, shape) else shape

    def read(self, name: str, index: Sequence[slice] | None = None) -> Tensor | None:
        shape = self._weights.shape(name)
        if shape is None:
            return None
        if not self._grows(name, shape):
            value = self._weights.read(name, index)
        else:
            start, stop, _ = (index[0] if index else slice(None)).indices(self._vocabulary)
            value = self._weights.read(name, (slice(min(start, shape[0]), min(stop, shape[0])),))
            added = stop - max(start, shape[0])
            if added > 0:
                mean = self._mean_row(name, shape[0]).to(value.dtype)
                value = torch.cat([value, mean.expand(added, -1)])
        self.dtypes[name] = value.dtype
        return value

    def _grows(self, name: str, shape: tuple[int, ...] | None) -> bool:
        wanted = self._vocabulary
        return wanted is not None and name in _VOCABULARY and shape is not None and shape[0] < wanted

    def _mean_row(self, name: str, rows: int) -> Tensor:
        """Mean of all rows [1, H] in fp64, read in blocks: only the rank that holds new rows needs it."""
        total = sum(
            self._weights.read(name, (slice(first, min(first + _BLOCK, rows)),)).double().sum(0, keepdim=True)
            for first in range(0, rows, _BLOCK)
        )
        return total / rows


class Loader:
    """Fills modules one after the other, for who can hold only some of them at a time.

    Attributes:
        dtypes: the checkpoint's dtype of each parameter filled so far, by global name; none for fresh ones.
    """

    def __init__(self, sources: Sequence[_Recorded], seed: int, std: float | None = None):
        self._sources, self._seed, self._std = sources, seed, std

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: dtype for source in self._sources for name, dtype in source.dtypes.items()}

    def check(self, modules: Iterable[nn.Module]) -> None:
        """Compare names and shapes, before any memory is used. Raises as :func:`load_llm`."""
        for module in modules:
            regions = module.regions() if hasattr(module, "regions") else {}
            for source in self._sources:
                find_weights(module, module.hf_names(), source, regions=regions)
        check_weights(self._sources)

    def fill(self, module: nn.Module) -> None:
        """Load the module's parameters or draw them, on the CPU. Raises UserError where a file is damaged."""
        fill_module(module, module.hf_names(), self._sources, self._seed, std=self._std)

    def fill_all(self, modules: Iterable[nn.Module]) -> dict[str, torch.dtype]:
        """Fill, and raise one UserError for all that did not fit. Returns ``dtypes``."""
        for module in modules:
            self.fill(module)
        check_weights(self._sources)
        return self.dtypes


def llm_loader(part: Any, config: PreTrainedConfig, seed: int) -> Loader:
    """Loader of an LLM's layers. See :func:`load_llm`."""
    sources = [_Recorded(llm_weights(part.path, config), config.vocab_size)] if part.path else []
    return Loader(sources, seed, config.initializer_range)


def model_loader(model: Multimodal, seed: int) -> Loader:
    """Loader of an LLM's layers and encoders from one checkpoint."""
    return Loader([_Recorded(model.weights())], seed)


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
    return llm_loader(part, config, seed).fill_all(modules)


def load_model(
    modules: Iterable[nn.Module], encoders: Iterable[Encoder], model: Multimodal, seed: int
) -> dict[str, torch.dtype]:
    """Fill this stage's layers and the encoders from one checkpoint. See :func:`load_llm`."""
    return model_loader(model, seed).fill_all((*modules, *encoders))


def load_encoder(encoder: Encoder, part: Any, config: PreTrainedConfig, seed: int) -> dict[str, torch.dtype]:
    """Fill an encoder: its tower from ``part.path`` if given, its projector freshly. See :func:`load_llm`."""
    sources = [_Recorded(tower_weights(encoder.name, part.path, config, encoder.config))] if part.path else []
    return Loader(sources, seed).fill_all([encoder])
