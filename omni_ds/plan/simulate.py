"""Event simulation of lowered actions: when everything runs, and what each rank waits for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from omni_ds.plan.actions import COLLECTIVES, RECEIVES, SENDS, Action, Kind
from omni_ds.plan.graph import ActionGraph

CAUSES = {
    "RF": "activations",
    "RB": "gradients",
    "RX": "features",
    "RG": "feature gradients",
    "program": "other ranks",
    "end": "end of step",
}


@dataclass(frozen=True)
class Links:
    """Time of a message: latency + rows * row_time, in the unit of the compute times."""

    latency: int = 0
    row_time: int = 0


@dataclass(frozen=True)
class Simulation:
    """times[rank]: (action, start, end) of what blocks the rank's program, in order. length: end of the step.

    idle[rank]: cause -> time. peak_micro_batches, peak_windows[rank]: most forwards alive before their
    backwards. spans[rank]: (action, start, end) of all actions in program order; a message spans its
    transfer, on both ends.
    """

    times: Mapping[int, tuple[tuple[Action, int, int], ...]]
    length: int
    idle: Mapping[int, Mapping[str, int]]
    peak_micro_batches: Mapping[int, int]
    peak_windows: Mapping[int, int]
    spans: Mapping[int, tuple[tuple[Action, int, int], ...]]

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks' time."""
        total = self.length * len(self.idle)
        return sum(sum(causes.values()) for causes in self.idle.values()) / total if total else 0.0


def simulate(
    graph: ActionGraph,
    compute_time: Callable[[int, Action], int],
    *,
    links: Links | None = None,
    rows: Callable[[int, Action], int] = lambda rank, action: 0,
) -> Simulation:
    """Run the graph. compute_time(rank, action): of compute and collectives; rows(rank, send action):
    message size."""
    links = links or Links()
    start, end = [0] * len(graph.needs), [0] * len(graph.needs)
    cause = ["program"] * len(graph.needs)
    for node in graph.order():
        for earlier, why in graph.needs[node]:
            # Among equals the message is named: what it carried is what the rank could not start without.
            if end[earlier] > start[node]:
                start[node], cause[node] = end[earlier], why
        action = graph.action(node)
        if action.kind in SENDS or action.kind in RECEIVES:
            rank, position = next(m for m in graph.members[node] if graph.programs[m[0]][m[1]].kind in SENDS)
            duration = links.latency + links.row_time * rows(rank, graph.programs[rank][position])
        else:
            duration = max(compute_time(r, graph.programs[r][p]) for r, p in graph.members[node])
        end[node] = start[node] + duration
    length = max(end, default=0)
    times, idle = {}, {}
    for rank, nodes in graph.program.items():
        at, waits, mine = 0, {}, []
        for node in nodes:
            if start[node] > at:
                name = CAUSES.get(cause[node], CAUSES["program"])
                waits[name] = waits.get(name, 0) + start[node] - at
            at = end[node]
            position = next(p for r, p in graph.members[node] if r == rank)
            mine.append((graph.programs[rank][position], start[node], end[node]))
        if length > at:
            waits[CAUSES["end"]] = length - at
        times[rank], idle[rank] = tuple(mine), waits
    span_of = {member: (start[n], end[n]) for n, members in enumerate(graph.members) for member in members}
    spans = {
        rank: tuple((action, *span_of[rank, position]) for position, action in enumerate(actions))
        for rank, actions in graph.programs.items()
    }
    peaks = {rank: peak_live(tuple(a for a, _, _ in mine)) for rank, mine in times.items()}
    return Simulation(
        times, length, idle, {r: p[0] for r, p in peaks.items()}, {r: p[1] for r, p in peaks.items()}, spans
    )


def peak_live(actions: tuple[Action, ...]) -> tuple[int, int]:
    """Most micro-batches and most windows of a rank whose backward is still to come, over its program."""
    live = {Kind.F: 0, Kind.EF: 0}
    peak = {Kind.F: 0, Kind.EF: 0}
    closes = {Kind.B: Kind.F, Kind.EB: Kind.EF}
    if any(a.kind is Kind.W for a in actions):
        closes = {Kind.W: Kind.F, Kind.EB: Kind.EF}
    trains = {closes[a.kind] for a in actions if a.kind in closes}
    for action in actions:
        if action.kind in trains:
            live[action.kind] += 1
            peak[action.kind] = max(peak[action.kind], live[action.kind])
        elif action.kind in closes:
            live[closes[action.kind]] -= 1
    return peak[Kind.F], peak[Kind.EF]


def compute_only(action: Action) -> bool:
    return action.kind not in SENDS and action.kind not in RECEIVES and action.kind not in COLLECTIVES
