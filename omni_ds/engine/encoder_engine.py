"""The encoders' own DeepSpeed engine: replicated on every rank, optimizer state sharded over the world.

Encoders with anything to train share one engine; fully frozen ones are plain modules under ``no_grad``.
Gradients are reduced once a step, in the planned ``ER`` action, so that EF and EB are free of world
collectives and each rank may run them when it has time. ZeRO-3 is the exception: there every pass gathers
parameters, so every rank runs the planned passes in the same order.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from models.encoders import ItemSlice, RuntimeEncoders
from omni_ds.engine.encoder_ranks import EncoderRanks
from omni_ds.engine.optimizer_adapter import OptimizerAdapter, adapt


@dataclass
class _LiveWindow:
    """What EB needs of a window's EF: the trainable output and where its rows lie in the window's output."""

    trainable_output: Tensor
    trainable_rows: Tensor  # [rows] int64: row of the window output for each row of trainable_output


class EncoderEngine:
    """Runs the encoders of this rank.

    Args:
        order: all encoder names in config order, the order of output rows.
        trainable: encoders with trainable parameters, or None.
        frozen: fully frozen encoders, or None.
        engine: the DeepSpeed engine that wraps ``trainable``, or None with it.
        width: of a feature row (Plan.row_width).
        zero_stage: of the encoder engine.
        dtype, device: of inputs and features.
        ranks: that share the encoders.
        share_norm: sums a float64 over the world; given where some ranks hold no encoders, so that all learn
            the encoders' gradient norm.
    """

    def __init__(
        self,
        order: Sequence[str],
        trainable: RuntimeEncoders | None,
        frozen: RuntimeEncoders | None,
        engine: DeepSpeedEngine | None,
        width: int,
        zero_stage: int,
        dtype: torch.dtype,
        device: torch.device,
        ranks: EncoderRanks,
        share_norm: Callable[[float], float] | None = None,
    ):
        self.ranks = ranks
        self._share_norm = share_norm
        self._order = tuple(order)
        self._modules = {"trainable": trainable, "frozen": frozen}
        self.engine = engine
        self._width = width
        self._zero_stage = zero_stage
        self._dtype, self._device = dtype, device
        self._live: dict[Hashable, _LiveWindow] = {}
        self._accumulation: ExitStack | None = None
        self._remaining: list[int] = []
        self.adapter: OptimizerAdapter | None = None
        if engine is not None:
            self.adapter = adapt(engine.optimizer)
            engine.enable_backward_allreduce = zero_stage == 3

    @property
    def trainable(self) -> bool:
        """Whether any encoder has trainable parameters."""
        return self.engine is not None

    def modules(self) -> Iterator[nn.Module]:
        return (module for module in self._modules.values() if module is not None)

    def encoders(self) -> dict[str, nn.Module]:
        """Every encoder on this rank by name, in config order."""
        found = {name: encoder for module in self.modules() for name, encoder in module.encoders.items()}
        return {name: found[name] for name in self._order if name in found}

    def train(self, mode: bool = True) -> None:
        for module in self.modules():
            module.train(mode)

    def forward(
        self,
        window: int,
        media: Mapping[str, Sequence[Tensor]],
        rows: Mapping[str, int],
        passes: Sequence[str],
        keep_graph: bool,
        shapes: Mapping[str, Sequence[Sequence[int]]],
    ) -> Tensor:
        """Encode this rank's share of a window.

        Args:
            window: its index; EB refers to it.
            media: preprocessed media by encoder, in share order (image [3, H, W], as tiles [3, tiles, H, W],
                audio [mels, frames]).
            rows: feature rows of the share by encoder.
            passes: encoders that must run even without media (world collectives under ZeRO-3).
            keep_graph: False in evaluation.
            shapes: of the share's items by encoder, as planned.

        Returns:
            [rows, width] in config order of encoders, without a graph.
        """
        media = {
            name: [value.to(self._device, non_blocking=True).to(self._dtype) for value in values]
            for name, values in media.items()
        }
        blocks: dict[str, Tensor] = {}
        blocks.update(self._run_frozen(media, rows, shapes))
        output, trainable_rows = self._run_trainable(media, passes, keep_graph, shapes)
        if output is not None:
            names = [name for name in self._order if name in trainable_rows]
            blocks.update(zip(names, output.detach().split([rows[n] for n in names]), strict=True))
            if keep_graph:
                self._live[window] = _LiveWindow(output, _row_index(self._order, rows, names, self._device))
        present = [blocks[name] for name in self._order if name in blocks]
        if not present:
            return torch.zeros((0, self._width), dtype=self._dtype, device=self._device)
        return torch.cat(present)

    def _run_frozen(
        self,
        media: Mapping[str, list[Tensor]],
        rows: Mapping[str, int],
        shapes: Mapping[str, Sequence[Sequence[int]]],
    ) -> dict[str, Tensor]:
        module = self._modules["frozen"]
        names = [] if module is None else [name for name in module.encoders if media.get(name)]
        if not names:
            return {}
        with torch.no_grad():
            output = module({name: media[name] for name in names}, (), shapes)
        return dict(zip(names, output.split([rows[name] for name in names]), strict=True))

    def _run_trainable(
        self,
        media: Mapping[str, list[Tensor]],
        passes: Sequence[str],
        keep_graph: bool,
        shapes: Mapping[str, Sequence[Sequence[int]]],
    ) -> tuple[Tensor | None, set[str]]:
        module = self._modules["trainable"]
        if module is None:
            return None, set()
        present = {name: media[name] for name in module.encoders if media.get(name)}
        minimal = tuple(
            n for n in module.encoders if self._zero_stage == 3 and n in passes and n not in present
        )
        if not present and not minimal:
            return None, set()
        with self.ranks.active(), torch.set_grad_enabled(keep_graph):
            run = self.engine if keep_graph else module
            output = run(present, minimal, shapes)
        return output, set(present)

    def forward_slice(
        self, key: Hashable, name: str, value: Tensor, part: ItemSlice, keep_graph: bool
    ) -> Tensor:
        """Encode this rank's slice of an item that a group of ranks encodes together; collective over it.

        Not under ZeRO-3, where every pass is a collective of the world.

        Args:
            key: ``backward`` refers to it.
            name: of the encoder.
            value: the item, or what ``part`` needs of it.

        Returns:
            [rows of the slice, width], without a graph.
        """
        trainable = self._modules["trainable"]
        trains = trainable is not None and name in trainable.encoders
        module = trainable if trains else self._modules["frozen"]
        value = value.to(self._device, non_blocking=True).to(self._dtype)
        with self.ranks.active(), torch.set_grad_enabled(keep_graph and trains):
            output = module.forward_slice(name, value, part)
        if keep_graph and trains:
            every_row = torch.arange(output.shape[0], device=self._device)
            self._live[key] = _LiveWindow(output, every_row)
        return output.detach()

    def backward(self, window: Hashable, gradient: Tensor) -> None:
        """Accumulate parameter gradients of a window, or of the slice of that key.

        Args:
            gradient: [rows, width] of the window output, already scaled so that the mean over the
                engine's ranks is the sum we want.
        """
        live = self._live.pop(window, None)
        if live is None:  # nothing trainable in this rank's share
            return
        self._begin_accumulation()
        with self.ranks.active():
            self.engine.optimizer.clear_backward_seen_flag()
            # ZeRO-3 reduces in every pass and must know the last one; stages 1 and 2 reduce in ER.
            self.engine.set_gradient_accumulation_boundary(
                self._zero_stage == 3 and self._remaining == [window]
            )
            live.trainable_output.backward(gradient.index_select(0, live.trainable_rows))
        if window in self._remaining:
            self._remaining.remove(window)

    def begin_step(self, backward_windows: Sequence[int]) -> None:
        """Announce the windows whose EB will run planned passes on every rank, in order."""
        self._remaining = list(backward_windows)

    def _coalesces(self) -> bool:
        return self._zero_stage in (1, 2) and not isinstance(self.engine.optimizer, BF16_Optimizer)

    def _begin_accumulation(self) -> None:
        if self._accumulation is None:
            self._accumulation = ExitStack()
            if self._coalesces():
                self._accumulation.enter_context(self.engine.coalesce_grad_reduction())

    def reduce(self) -> None:
        """Sum the step's gradients over the world: the ER action."""
        if self.engine is None:
            return
        with self.ranks.active():
            self._begin_accumulation()
            # For encoders that this rank had no media for.
            self.adapter.fill_missing(p for p in self.engine.module.parameters() if p.requires_grad)
            self._accumulation.close()  # with coalescing, this is where DeepSpeed reduces
            self._accumulation = None
            # Sums would be rounded to bf16 for sending, even to nobody.
            if isinstance(self.engine.optimizer, BF16_Optimizer) and self.ranks.size > 1:
                self.engine.set_gradient_accumulation_boundary(True)
                self.engine.allreduce_gradients()

    def squared_norm(self) -> Tensor:
        """Squared gradient norm of the encoders, the same float64 scalar on all ranks, after `reduce`."""
        squared = torch.zeros((), dtype=torch.float64)
        if self.adapter is not None:
            with self.ranks.active():
                squared = self.adapter.squared_norm()
        if self._share_norm is None:
            return squared
        mine = float(squared) if dist.get_rank() == 0 else 0.0
        return torch.tensor(self._share_norm(mine), dtype=torch.float64)

    def step(self, norm: float, clip: float) -> None:
        if self.adapter is not None:
            with self.ranks.active():
                self.adapter.step(norm, clip)

    def skip_step(self) -> None:
        if self.adapter is not None:
            with self.ranks.active():
                self.adapter.skip()

    def discard_live(self) -> None:
        """Forget graphs that no EB will consume (evaluation, or a step without targets)."""
        self._live.clear()


def _row_index(
    order: Sequence[str], rows: Mapping[str, int], wanted: Sequence[str], device: torch.device
) -> Tensor:
    starts, position = {}, 0
    for name in order:
        starts[name] = position
        position += rows.get(name, 0)
    ranges = [torch.arange(starts[n], starts[n] + rows[n], device=device) for n in wanted]
    return torch.cat(ranges) if ranges else torch.zeros(0, dtype=torch.int64, device=device)
