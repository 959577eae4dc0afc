"""Feature reshard: which rank encodes what, and where its feature rows go.

The output of a window on a rank is one tensor [rows, hidden]: its items grouped by encoder in config order,
then by (micro-batch, position, ordinal). A Transfer moves rows of that tensor to packed token positions of
the micro-batches of the window on a rank of stage 0; `transposed()` is its adjoint, which moves their
gradients back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from omni_ds.plan.sample import Item


@dataclass(frozen=True)
class PlacedItem:
    """An item of a micro-batch; position: offset of its sample in the packed micro-batch, in tokens."""

    item: Item
    micro_batch: int
    position: int


@dataclass(frozen=True)
class Share:
    """What one rank encodes of a window, in the order of its output rows."""

    rank: int
    items: tuple[PlacedItem, ...]

    @cached_property
    def rows(self) -> int:
        return sum(placed.item.rows for placed in self.items)

    @cached_property
    def whole(self) -> tuple[PlacedItem, ...]:
        """Items that the rank encodes by itself."""
        return tuple(placed for placed in self.items if placed.item.gang == 1)

    @cached_property
    def slices(self) -> tuple[PlacedItem, ...]:
        """Slices of items that a gang encodes together."""
        return self.items[len(self.whole) :]


@dataclass(frozen=True)
class Window:
    """Consecutive micro-batches encoded together; one share for each rank of the encoder group, in its order,
    and behind them those of guests (gangs.py).

    passes: encoders that every rank must run (at least once) in this window even when its share holds none of
    their items; the executor then runs a minimal pass with zero gradient. Under encoder ZeRO-3 these are all
    encoders with items in this window anywhere in the world, in config order: every pass is a world
    collective.
    """

    index: int
    micro_batches: tuple[int, ...]
    shares: tuple[Share, ...]
    passes: tuple[str, ...] = ()

    def share(self, rank: int) -> Share:
        share = self.find(rank)
        if share is not None:
            return share
        raise KeyError(f"rank {rank} is not in the encoder group of window {self.index}")

    def find(self, rank: int) -> Share | None:
        for share in self.shares:
            if share.rank == rank:
                return share
        return None

    @property
    def empty(self) -> bool:
        return not any(share.items for share in self.shares)


@dataclass(frozen=True)
class Piece:
    """Rows [source_start, + rows) of the source's window output <-> packed token positions
    [destination_start, + rows) of a micro-batch."""

    micro_batch: int
    source_start: int
    destination_start: int
    rows: int


@dataclass(frozen=True)
class Transfer:
    """One message: the pieces concatenated in order, [rows, hidden]. source == destination is a local copy.

    output: which output of the encoders; stage: pipeline stage that consumes it.
    """

    window: int
    source: int
    destination: int
    stage: int = 0
    output: str = "features"
    pieces: tuple[Piece, ...] = ()
    gradient: bool = False

    @cached_property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)

    @property
    def local(self) -> bool:
        return self.source == self.destination

    def transposed(self) -> Transfer:
        """The adjoint: the gradient of the same rows, destination and source exchanged.

        Pieces keep their meaning (source_start indexes the encoder's output, destination_start the packed
        tokens), so that both ends address the same rows in both directions.
        """
        return replace(self, source=self.destination, destination=self.source, gradient=not self.gradient)


def order_share(items: Sequence[PlacedItem], encoder_order: dict[str, int]) -> tuple[PlacedItem, ...]:
    """Items in the order of the output rows: encoder (config order), micro-batch, position, ordinal; slices
    of long items behind them."""
    return tuple(
        sorted(
            items,
            key=lambda p: (
                p.item.gang > 1,
                encoder_order[p.item.encoder],
                p.micro_batch,
                p.position,
                p.item.ordinal,
            ),
        )
    )


def window_transfers(
    window: Window, first_stage: Sequence[int], runs: Mapping[int, Sequence[tuple[int, int, int]]]
) -> tuple[Transfer, ...]:
    """One transfer for each rank with items and each rank of the first stage that needs rows of it.

    first_stage: ranks that embed the window's micro-batches, by lane; runs[micro-batch]: which lane receives
    which rows (shards.deal_rows). A transfer's pieces are sorted by (micro_batch, destination_start);
    neighbouring runs of rows are merged.
    """
    transfers = []
    for share in window.shares:
        pieces: dict[int, list[Piece]] = {}
        start = 0
        for placed in share.items:
            for offset, length in placed.item.spans:
                token = placed.position + offset
                for at, stop, lane in _lanes(runs[placed.micro_batch], token, token + length):
                    piece = Piece(placed.micro_batch, start + at - token, at, stop - at)
                    pieces.setdefault(lane, []).append(piece)
                start += length
        for lane in sorted(pieces):
            transfers.append(
                Transfer(window.index, share.rank, first_stage[lane], pieces=_merged(pieces[lane]))
            )
    return tuple(transfers)


def _lanes(runs: Sequence[tuple[int, int, int]], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The parts of sorted `runs` that lie in [start, stop)."""
    for position in range(bisect_right(runs, start, key=lambda run: run[1]), len(runs)):
        low, high, lane = runs[position]
        if low >= stop:
            return
        yield max(low, start), min(high, stop), lane


def _merged(pieces: list[Piece]) -> tuple[Piece, ...]:
    merged: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: (p.micro_batch, p.destination_start)):
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.micro_batch == piece.micro_batch
            and last.source_start + last.rows == piece.source_start
            and last.destination_start + last.rows == piece.destination_start
        ):
            merged[-1] = replace(last, rows=last.rows + piece.rows)
        else:
            merged.append(piece)
    return tuple(merged)
