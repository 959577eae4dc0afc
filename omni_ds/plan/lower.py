"""Lowering: a rank's compute actions -> the same with messages and collectives, by small pure passes.

A send follows its producer. A receive is posted one compute action ahead of its consumer, so that the data
move while the rank still computes; the consumer waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from omni_ds.plan.actions import SENDS, Action, Kind
from omni_ds.plan.reshard import Transfer, Window


@dataclass(frozen=True)
class Neighbours:
    """Global ranks of the previous and next stage of one replica and lane; None at the ends."""

    previous: int | None
    next: int | None


@dataclass(frozen=True)
class Routes:
    """Which windows a rank exchanges features in: built once for a replica, looked up by every rank.

    outgoing[rank]: (window, destination); incoming[rank]: first consuming micro-batch -> (window, source);
    returning[rank]: last consuming micro-batch of the window -> (window, source).
    """

    outgoing: Mapping[int, Mapping[int, tuple[int, ...]]]
    incoming: Mapping[int, Mapping[int, tuple[tuple[int, int], ...]]]
    returning: Mapping[int, Mapping[int, tuple[tuple[int, int], ...]]]

    @classmethod
    def of(cls, windows: Sequence[Window], transfers: Iterable[Transfer]) -> Routes:
        last = {window.index: window.micro_batches[-1] for window in windows}
        outgoing: dict[int, dict[int, tuple[int, ...]]] = {}
        incoming: dict[int, dict[int, tuple[tuple[int, int], ...]]] = {}
        returning: dict[int, dict[int, tuple[tuple[int, int], ...]]] = {}
        for transfer in transfers:
            if transfer.local:
                continue
            w, source, destination = transfer.window, transfer.source, transfer.destination
            first = min(piece.micro_batch for piece in transfer.pieces)
            by_window = outgoing.setdefault(source, {})
            by_window[w] = (*by_window.get(w, ()), destination)
            for table, m in ((incoming, first), (returning, last[w])):
                by_micro_batch = table.setdefault(destination, {})
                by_micro_batch[m] = (*by_micro_batch.get(m, ()), (w, source))
        return cls(outgoing, incoming, returning)


def add_messages(
    compute: Sequence[Action], rank: int, neighbours: Neighbours, routes: Routes, *, gradients: bool
) -> tuple[Action, ...]:
    """Insert the point-to-point messages of one rank. gradients: feature gradients travel back to the
    encoders."""
    outgoing = routes.outgoing.get(rank, {})
    incoming = routes.incoming.get(rank, {})
    returning = routes.returning.get(rank, {}) if gradients else {}
    before, after = neighbours.previous, neighbours.next

    def receives(action: Action) -> list[Action]:
        kind, index, chunk = action.kind, action.index, action.chunk
        if kind is Kind.F:
            found = [Action(Kind.RECV_X, w, 0, source) for w, source in incoming.get(index, ())]
            return found if before is None else [*found, Action(Kind.RECV_F, index, chunk, before)]
        if kind in (Kind.B, Kind.I) and after is not None:
            return [Action(Kind.RECV_B, index, chunk, after)]
        if kind is Kind.EB:
            return [Action(Kind.RECV_G, index, 0, peer) for peer in outgoing.get(index, ())]
        return []

    def sends(action: Action) -> list[Action]:
        kind, index, chunk = action.kind, action.index, action.chunk
        if kind is Kind.F and after is not None:
            return [Action(Kind.SEND_F, index, chunk, after)]
        if kind in (Kind.B, Kind.I):
            found = [] if before is None else [Action(Kind.SEND_B, index, chunk, before)]
            return found + [Action(Kind.SEND_G, w, 0, source) for w, source in returning.get(index, ())]
        if kind is Kind.EF:
            return [Action(Kind.SEND_X, index, 0, peer) for peer in outgoing.get(index, ())]
        return []

    lowered = receives(compute[0]) if compute else []
    for position, action in enumerate(compute):
        if position + 1 < len(compute):
            lowered += receives(compute[position + 1])
        lowered.append(action)
        lowered += sends(action)
    return tuple(lowered)


def add_step_end(
    actions: Sequence[Action], *, tied: bool, llm_trainable: bool, encoders_trainable: bool, last_window: int
) -> tuple[Action, ...]:
    """Add what ends a training step: gradient reductions, the joint norm, the optimizer step.

    The LLM's gradients are reduced as soon as this stage has them, behind the messages of its last backward,
    while other stages and encoders still work. Tied weights are summed between the first and the last stage
    first; until the first has its last backward, the last one runs the EBs of earlier windows.

    tied: this rank holds one of two copies of a tied weight. last_window: the one whose EB needs the first
    stage's last backward.
    """
    found = list(actions)
    if llm_trainable:
        at = _after_last_backward(actions)
        if tied:
            early = [i for i, a in enumerate(actions) if a.kind is Kind.EB and a.index < last_window]
            at = max([at, *(i + 1 for i in early)])
        found[at:at] = [Action(Kind.TIED), Action(Kind.REDUCE)] if tied else [Action(Kind.REDUCE)]
    if encoders_trainable:
        found.append(Action(Kind.ER))
    return (*found, Action(Kind.NORM), Action(Kind.STEP))


def _after_last_backward(actions: Sequence[Action]) -> int:
    """Position behind the last backward of the LLM and the messages that it sends."""
    backwards = [i for i, a in enumerate(actions) if a.kind in (Kind.B, Kind.I, Kind.W)]
    at = backwards[-1] + 1 if backwards else len(actions)
    while at < len(actions) and actions[at].kind in SENDS:
        at += 1
    return at
