"""The dependency graph of lowered actions, on which validation proves that nothing hangs and simulation runs.

Assumptions, the strictest of the back ends: a message starts when both ends have been posted (rendezvous);
messages of one kind between two ranks run in the order they were posted; compute and collectives block the
rank's program, posting a message does not. Collectives are one node for their whole group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from omni_ds.plan.actions import RECEIVE_OF, RECEIVES, SENDS, Action, Kind

CONSUMER = {
    Kind.RECV_F: (Kind.F,),
    Kind.RECV_B: (Kind.B, Kind.I),
    Kind.RECV_G: (Kind.EB,),
    Kind.RECV_X: (Kind.F,),
}


class ScheduleError(ValueError):
    """A plan that would hang or compute something wrong; `where` is the (rank, position) to look at."""

    def __init__(self, message: str, where: tuple[int, int] | None = None):
        super().__init__(message)
        self.where = where


@dataclass
class ActionGraph:
    """Nodes are compute actions, messages (a send with its receive) and collectives (all ranks of a group).

    members[n]: (rank, position) pairs of a node; needs[n]: (earlier node, why) pairs; program[rank]: nodes
    that block the rank's program, in order.
    """

    programs: Mapping[int, Sequence[Action]]
    members: list[list[tuple[int, int]]] = field(default_factory=list)
    needs: list[list[tuple[int, str]]] = field(default_factory=list)
    program: dict[int, list[int]] = field(default_factory=dict)

    def action(self, node: int) -> Action:
        rank, position = self.members[node][0]
        return self.programs[rank][position]

    def order(self) -> list[int]:
        """Nodes, each after everything it needs (Kahn). ScheduleError with a cycle when there is none."""
        waiting = [len(needs) for needs in self.needs]
        feeds: list[list[int]] = [[] for _ in self.needs]
        for node, needs in enumerate(self.needs):
            for earlier, _ in needs:
                feeds[earlier].append(node)
        ready = [node for node, count in enumerate(waiting) if not count]
        for node in ready:
            for later in feeds[node]:
                waiting[later] -= 1
                if not waiting[later]:
                    ready.append(later)
        if len(ready) < len(self.needs):
            done = set(ready)
            raise ScheduleError(*self._cycle(next(n for n in range(len(self.needs)) if n not in done), done))
        return ready

    def _cycle(self, node: int, done: set[int]) -> tuple[str, tuple[int, int]]:
        path: dict[int, int] = {}
        trail = []
        while node not in path:
            path[node] = len(trail)
            trail.append(node)
            node = next(earlier for earlier, _ in self.needs[node] if earlier not in done)
        cycle = trail[path[node] :]
        text = " <- ".join(f"{self.action(n)} on rank {self.members[n][0][0]}" for n in [*cycle, cycle[0]])
        return f"deadlock: {text}", self.members[cycle[0]][0]


def build_graph(
    programs: Mapping[int, Sequence[Action]],
    window_micro_batches: Callable[[int, int], Sequence[int]],
    collective_group: Callable[[int, Action], Sequence[int] | None],
) -> ActionGraph:
    """Graph of the actions of all ranks.

    window_micro_batches(rank, window): micro-batches of a window of the rank's replica.
    collective_group(rank, action): ranks that enter the action together, None for an action of this rank
    alone. ScheduleError when sends and receives, or the collectives of a group, do not pair up.
    """
    graph = ActionGraph(programs)
    node_of: dict[tuple[int, int], int] = {}
    _pair_messages(graph, node_of)
    _join_collectives(graph, node_of, collective_group)
    for rank, actions in programs.items():
        for position, action in enumerate(actions):
            if (rank, position) not in node_of and action.kind not in SENDS and action.kind not in RECEIVES:
                _add(graph, node_of, [(rank, position)])
    for rank, actions in programs.items():
        _add_needs(graph, node_of, rank, actions, window_micro_batches)
    return graph


def _add(graph: ActionGraph, node_of: dict, members: list[tuple[int, int]]) -> None:
    for member in members:
        node_of[member] = len(graph.members)
    graph.members.append(members)
    graph.needs.append([])


def _pair_messages(graph: ActionGraph, node_of: dict) -> None:
    lanes: dict[tuple[Kind, int, int], tuple[list, list]] = {}
    for rank, actions in graph.programs.items():
        for position, action in enumerate(actions):
            if action.kind in SENDS:
                lane = lanes.setdefault((RECEIVE_OF[action.kind], rank, action.peer), ([], []))
                lane[0].append((action, (rank, position)))
            elif action.kind in RECEIVES:
                lane = lanes.setdefault((action.kind, action.peer, rank), ([], []))
                lane[1].append((action, (rank, position)))
    for (kind, source, destination), (sent, received) in lanes.items():
        for (out, at), (into, there) in zip(sent, received, strict=False):
            if (out.index, out.chunk) != (into.index, into.chunk):
                raise ScheduleError(
                    f"rank {source} sends {out} where rank {destination} receives {into}", there
                )
            _add(graph, node_of, [at, there])
        if len(sent) != len(received):
            longer = sent if len(sent) > len(received) else received
            action, where = longer[min(len(sent), len(received))]
            raise ScheduleError(
                f"{action} on rank {where[0]} has no partner: rank {source} sends {len(sent)}, "
                f"rank {destination} receives {len(received)} messages {kind.value}",
                where,
            )


def _join_collectives(graph: ActionGraph, node_of: dict, collective_group: Callable) -> None:
    sequences: dict[tuple[int, ...], dict[int, list[tuple[Action, int]]]] = {}
    for rank, actions in graph.programs.items():
        for position, action in enumerate(actions):
            group = collective_group(rank, action)
            if group is not None and len(group) > 1:
                sequences.setdefault(tuple(group), {}).setdefault(rank, []).append((action, position))
    for group, by_rank in sequences.items():
        first = by_rank.get(group[0], [])
        for rank in group:
            mine = by_rank.get(rank, [])
            for (expected, _), (action, position) in zip(first, mine, strict=False):
                if expected != action:
                    raise ScheduleError(
                        f"rank {rank} enters {action} where rank {group[0]} enters {expected}",
                        (rank, position),
                    )
            if len(mine) != len(first):
                raise ScheduleError(
                    f"rank {rank} enters {len(mine)} collectives of group {group}, "
                    f"rank {group[0]} {len(first)}",
                    (rank, mine[-1][1]) if mine else None,
                )
        for steps in zip(*(by_rank[rank] for rank in group), strict=True):
            _add(graph, node_of, [(rank, p) for rank, (_, p) in zip(group, steps, strict=True)])


def _add_needs(
    graph: ActionGraph, node_of: dict, rank: int, actions: Sequence[Action], window_micro_batches
) -> None:
    needs, chain = graph.needs, graph.program.setdefault(rank, [])
    last_message: dict[tuple[Kind, int], int] = {}
    posted: dict[tuple[Kind, int], list[int]] = {}
    for position, action in enumerate(actions):
        node, kind = node_of[rank, position], action.kind
        if chain:
            needs[node].append((chain[-1], "program"))
        if kind in SENDS or kind in RECEIVES:
            lane = (kind, action.peer)
            if lane in last_message:
                needs[node].append((last_message[lane], "order"))
            last_message[lane] = node
            if kind is Kind.RECV_X:
                for m in window_micro_batches(rank, action.index):
                    posted.setdefault((Kind.F, m), []).append(node)
            elif kind in RECEIVES:
                for consumer in CONSUMER[kind]:
                    posted.setdefault((consumer, action.index), []).append(node)
            continue
        for message in posted.pop((kind, action.index), ()):
            needs[node].append((message, graph.programs[rank][_mine(graph, message, rank)].kind.value))
        chain.append(node)


def _mine(graph: ActionGraph, node: int, rank: int) -> int:
    return next(position for r, position in graph.members[node] if r == rank)
