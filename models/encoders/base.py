"""What all encoders share: packed tower layers, the projector, names, trainability.

Shapes: T packed tower tokens, C tower width, H hidden size of the LLM.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from models.fused import fuse
from models.masks import Packing
from models.projector import Projector
from omni_ds.parallel.ulysses import Ulysses
from omni_ds.plan.encoder_meta import EncoderMeta


@dataclass(frozen=True)
class ItemSlice:
    """One of the slices of an item. ``bounds``: tokens of all of them, (0, ..., T); ``group``: the ranks that
    encode them, in that order. ``shape``: of the whole item where the value at hand is only the pixel
    rows that the slice needs (EncoderMeta.slice_pixels); None: the value is whole."""

    index: int
    bounds: tuple[int, ...]
    group: ProcessGroup
    shape: tuple[int, ...] | None = None

    @property
    def ulysses(self) -> Ulysses:
        return Ulysses(self.group, self.bounds)


class Encoder(nn.Module):
    """A tower (an HF class, cut at the feature layer) and its projector.

    ``meta`` is the plan's record of the encoder: lengths and rows computed there hold here. Parameters that
    exist for the sake of the HF class but take no part in the features (``unused``) never train.
    """

    unused: tuple[str, ...] = ()

    def __init__(
        self,
        meta: EncoderMeta,
        tower: nn.Module,
        recompute: bool = False,
        projector: nn.Module | None = None,
    ):
        super().__init__()
        self.meta, self.recompute = meta, recompute
        self.tower = tower
        fuse(tower)
        self.projector = Projector(meta) if projector is None else projector

    @property
    def name(self) -> str:
        return self.meta.name

    @property
    def config(self) -> PreTrainedConfig:
        """Config of the tower as built; the HF class built from it has exactly this tower's parameters."""
        return self.tower.config

    def hf_names(self) -> dict[str, str]:
        """Local parameter name -> global name."""
        return {name: f"encoders.{self.name}.{name}" for name, _ in self.named_parameters()}

    def constants(self) -> dict[str, Tensor]:
        """Local name -> value of parameters that do not start at random."""
        return {}

    def minimal_values(self, device: torch.device | str, dtype: torch.dtype) -> list[Tensor]:
        """The smallest legal item, all zero: for a rank without work that has to take part in a
        collective."""
        lead = self.meta.mels or self.meta.channels
        return [torch.zeros(lead, *self.meta.minimal_shape(), device=device, dtype=dtype)]

    def forward(self, values: Sequence[Tensor], shapes: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Items -> feature rows [rows, H], in item order.

        values: images [channels, height, width] or clips [mels, frames], float; they are cast to the tower's
        dtype. shapes: of the items as the plan has them; None: those of the values.
        """
        assert len(values), "an encoder pass needs at least one item; use minimal_values"
        if shapes is None:
            shapes = [tuple(value.shape[1:]) for value in values]
        trains = any(parameter.requires_grad for parameter in self.tower.parameters())
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains):
            features, grids = self.features(values)
        rows = self.project_items(features, grids, shapes)
        expected = sum(self.meta.measure(shape)[1] for shape in shapes)
        assert rows.shape[0] == expected, f"{rows.shape[0]} feature rows, the plan expects {expected}"
        return rows

    def forward_slice(self, value: Tensor, part: ItemSlice) -> Tensor:
        """Feature rows [rows of the slice, H] of one rank's slice of an item that a group encodes together.

        Collective over the group in every layer, forward and backward. ``value``: the item, or what
        ``part`` needs of it (ItemSlice.shape).
        """
        trains = any(parameter.requires_grad for parameter in self.tower.parameters())
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains):
            features, grid = self.slice_features(value, part)
        return self.project(features, [grid])

    def project_items(
        self, features: Tensor, grids: Sequence[tuple[int, int]], shapes: Sequence[Sequence[int]]
    ) -> Tensor:
        """Feature rows [rows, H] of whole items of these shapes."""
        return self.project(features, grids)

    def project(self, features: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """Feature rows [rows, H] of what :meth:`features` returned."""
        return self.projector(features, grids)

    def slice_features(self, value: Tensor, part: ItemSlice) -> tuple[Tensor, tuple[int, int]]:
        """Tower features [rows * columns, C] of a slice and their (rows, columns)."""
        raise NotImplementedError(f"{self.name}: items of this encoder are not cut inside a segment")

    @abstractmethod
    def features(self, values: Sequence[Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
        """Tower features [sum of rows * columns, C] and the (rows, columns) of each item's tokens."""

    def run_layers(
        self, layers: nn.ModuleList, hidden: Tensor, segments: Sequence[int], ulysses: Ulysses | None = None
    ) -> Tensor:
        """Tower layers, each called once, on packed tokens [T, C]; attention stays inside segments.

        ``ulysses``: the segments are cut over a group, of which this rank holds the tokens given.
        """
        packing = replace(Packing.of(segments, hidden.device), ulysses=ulysses)
        hidden = hidden.unsqueeze(0)
        for layer in layers:
            if self.recompute and torch.is_grad_enabled():
                hidden = checkpoint(
                    run_packed, layer, hidden, packing, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden = run_packed(layer, hidden, packing)
        return hidden.squeeze(0)


@cache
def _parameters(layer: type[nn.Module]) -> frozenset[str]:
    return frozenset(inspect.signature(layer.forward).parameters)


def run_packed(layer: nn.Module, hidden: Tensor, packing: Packing) -> Tensor:
    """An HF layer on [1, T, C].

    DINOv2's layers before transformers 5.20 take no mask; their attention module is told directly.
    """
    parameters = _parameters(type(layer))
    if "attention_mask" in parameters:
        return layer(hidden, packing)
    if "cu_seqlens" in parameters:  # Qwen's audio towers, whose attention modules take a Packing for it here
        return layer(hidden, cu_seqlens=packing)[0]
    attention = next(module for module in layer.modules() if hasattr(module, "is_causal"))
    attention.packing = packing
    return layer(hidden)
