"""What a rank encodes in a step: its share of each window, slices of long items for gangs, and where the rows
go."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from models.encoders import ItemSlice
from omni_ds.engine.encoder_engine import EncoderEngine
from omni_ds.engine.step import StepInput
from omni_ds.parallel.channel import Channel
from omni_ds.parallel.feature_reshard import FeatureReshard
from omni_ds.plan.build import Plan
from omni_ds.plan.reshard import Share
from omni_ds.plan.sample import Item


@dataclass(frozen=True)
class _Slice:
    """A slice this rank encodes, for a replica; place: in its share of the window."""

    data: int
    place: int
    item: Item


@dataclass(frozen=True)
class WindowRows:
    """Rows or their gradients. whole: [rows, width] of the items encoded here alone; slices: [rows, width]
    of each slice, in the order of :meth:`EncoderWindows.slices`."""

    whole: Tensor
    slices: tuple[Tensor, ...]


class EncoderWindows:
    """The encoder windows of one step on one rank.

    Args:
        plan, step, rank: what is encoded, with its media.
        encoders: the engine.
        gangs: size -> the block of neighbours that encode slices together.
        features, gradients: channels encoder rank -> stage, and back.
    """

    def __init__(
        self,
        plan: Plan,
        step: "StepInput",
        rank: int,
        encoders: EncoderEngine,
        gangs: Mapping[int, ProcessGroup],
        features: Channel,
        gradients: Channel,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._plan, self._step, self._rank = plan, step, rank
        self._encoders, self._gangs = encoders, gangs
        self._metas = {meta.name: meta for meta in plan.encoders}
        mine = plan.mesh.coords(rank).data
        # Of its own replica, and of those that this rank encodes slices for.
        self._reshards = {
            data: FeatureReshard(
                step.plan.replicas[data].transfers,
                rank,
                features,
                gradients,
                plan.row_width,
                dtype,
                device,
            )
            for data in (mine, *step.plan.hosted(rank))
        }
        self.own = self._reshards[mine]
        self._slices: dict[int, list[_Slice]] = {}
        # (replica, window) -> its output on this rank and how many messages of it are still to be sent.
        self._outputs: dict[tuple[int, int], tuple[Tensor, int]] = {}

    def slices(self, window: int) -> list[_Slice]:
        """Slices of this rank, in an order that all ranks of a gang have in common."""
        if window not in self._slices:
            found = [
                _Slice(data, place, placed.item)
                for data, share in self._shares(window)
                for place, placed in enumerate(share.slices)
            ]
            found.sort(key=lambda one: (one.data, one.item.row, one.item.ordinal))
            self._slices[window] = found
        return self._slices[window]

    def forward(self, window: int, keep_graph: bool) -> WindowRows:
        """Encode this rank's share: EF. A collective of the gangs it has slices with."""
        own, rows, shapes = self._shares(window)[0][1], {}, {}
        for placed in own.whole:
            rows[placed.item.encoder] = rows.get(placed.item.encoder, 0) + placed.item.rows
            shapes.setdefault(placed.item.encoder, []).append(placed.item.shape)
        media, passes = self._step.media.get(window, {}), self._passes(window)
        whole = self._encoders.forward(window, media, rows, passes, keep_graph=keep_graph, shapes=shapes)
        values = self._values(window)
        slices = tuple(self._forward_slice(window, one, values, keep_graph) for one in self.slices(window))
        return WindowRows(whole, slices)

    def _forward_slice(
        self, window: int, one: _Slice, values: Mapping[tuple[int, int], Tensor], keep_graph: bool
    ) -> Tensor:
        item = one.item
        bounds, _ = self._metas[item.encoder].slices(item.shape, item.gang)
        part = ItemSlice(item.slice, bounds, self._gangs[item.gang], item.shape)
        name, value = (one.data, one.place), values[one.data, one.place]
        return self._encoders.forward_slice((window, *name), item.encoder, value, part, keep_graph=keep_graph)

    def keep(self, window: int, made: WindowRows) -> None:
        """Keep the rows of EF until they are sent: to this rank's own stage at once."""
        of_slice = dict(zip(self._names(window), made.slices, strict=True))
        for data, share in self._shares(window):
            pieces = [made.whole] if data == self._mine else []
            output = torch.cat([*pieces, *(of_slice[data, place] for place in range(len(share.slices)))])
            assert output.shape[0] == share.rows, (
                f"window {window}: encoders made {output.shape[0]} rows for replica {data}, the plan says "
                f"{share.rows}"
            )
            reshard = self._reshards[data]
            if data == self._mine:
                reshard.keep_local(window, output)
            if reshard.receivers(window):
                self._outputs[data, window] = (output, reshard.receivers(window))

    def send(self, window: int, peer: int) -> None:
        """Send the rows of a window that ``peer`` needs."""
        data = self._replica_of(peer)
        output, left = self._outputs.pop((data, window))
        self._reshards[data].send(window, peer, output)
        if left > 1:  # the output is needed no longer than its last message
            self._outputs[data, window] = (output, left - 1)

    def post_gradient(self, window: int, peer: int) -> None:
        """Post the receive of the gradients of the rows that ``peer`` got."""
        self._reshards[self._replica_of(peer)].post_gradient(window, peer)

    def gradients(self, window: int) -> WindowRows:
        """Gradients of all rows of a window that this rank made; waits for those that travel."""
        whole, of_slice = None, {}
        for data, share in self._shares(window):
            rows = [sum(placed.item.rows for placed in share.whole)]
            rows += [placed.item.rows for placed in share.slices]
            first, *others = self._reshards[data].gradient_of(window, share.rows).split(rows)
            whole = first if whole is None else whole
            of_slice |= {(data, place): part for place, part in enumerate(others)}
        return WindowRows(whole, tuple(of_slice[name] for name in self._names(window)))

    def backward(self, window: int, gradients: WindowRows) -> None:
        """Accumulate parameter gradients: EB. A collective of the gangs, like EF."""
        scale = self._encoders.ranks.size / self._plan.mesh.data_degree
        self._encoders.backward(window, gradients.whole * scale)
        for name, gradient in zip(self._names(window), gradients.slices, strict=True):
            self._encoders.backward((window, *name), gradient * scale)

    @property
    def _mine(self) -> int:
        return self._replica_of(self._rank)

    def _replica_of(self, rank: int) -> int:
        return self._plan.mesh.coords(rank).data

    def _shares(self, window: int) -> Sequence[tuple[int, Share]]:
        return self._step.plan.shares(self._rank, window)

    def _passes(self, window: int) -> tuple[str, ...]:
        return self._step.plan.replica_of(self._rank).passes[window]

    def _names(self, window: int) -> list[tuple[int, int]]:
        return [(one.data, one.place) for one in self.slices(window)]

    def _values(self, window: int) -> dict[tuple[int, int], Tensor]:
        """Media by (replica, place); they come in the order of the shares."""
        names = [(data, place) for data, share in self._shares(window) for place in range(len(share.slices))]
        return dict(zip(names, self._step.long_media.get(window, ()), strict=True))
