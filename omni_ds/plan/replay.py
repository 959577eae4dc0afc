"""Times of a given compute order: every action starts when its stage is free and its inputs are there."""

from __future__ import annotations

from collections.abc import Sequence

from omni_ds.plan.actions import Action, Kind
from omni_ds.plan.base import LLMWork
from omni_ds.plan.fill import EncoderWork, Schedule, live_peak


def replay(
    llm: LLMWork,
    encoder: EncoderWork,
    stages: Sequence[Sequence[Action]],
    *,
    together: bool = False,
    sources: Sequence[int] | None = None,
) -> Schedule:
    """Schedule with the times of these orders. Messages take no time.

    together: EF and EB start at the same moment on all stages (world collectives). sources: stages whose
    features the forwards wait for (default: all). Asserts that the order does not deadlock.
    """
    last = len(stages) - 1
    sources = range(last + 1) if sources is None else sources
    window_of = {m: w for w, members in enumerate(encoder.windows) for m in members}
    position_of = {encoder.number(w): w for w in range(len(encoder.windows))}
    done: dict[tuple[Kind, int, int], int] = {}
    free, at = [0] * len(stages), [0] * len(stages)
    times: list[list[tuple[int, int]]] = [[] for _ in stages]

    def inputs(s: int, action: Action) -> list[tuple[Kind, int, int]]:
        kind, index = action.kind, action.index
        if kind is Kind.F:
            if s:
                return [(Kind.F, s - 1, index)]
            w = window_of.get(index)
            if w is None:
                return []
            shares = encoder.forward[w]
            return [(Kind.EF, source, encoder.number(w)) for source in sources if together or shares[source]]
        if kind is Kind.B:
            return [(Kind.B, s + 1, index) if s < last else (Kind.F, s, index)]
        if kind is Kind.EB and s in sources:
            return [(Kind.B, 0, m) for m in encoder.windows[position_of[index]]]
        return []

    def cost(s: int, action: Action) -> int:
        kind, index = action.kind, action.index
        if kind in (Kind.F, Kind.B):
            return (llm.forward if kind is Kind.F else llm.backward)[s][index]
        if s not in sources:
            return 0
        return (encoder.forward if kind is Kind.EF else encoder.backward)[position_of[index]][s]

    def run(s: int, begin: int) -> None:
        action = stages[s][at[s]]
        end = begin + cost(s, action)
        times[s].append((begin, end))
        done[action.kind, s, action.index] = free[s] = end
        at[s] += 1

    moved = True
    while moved:
        moved = False
        for s, actions in enumerate(stages):
            while at[s] < len(actions):
                action = actions[at[s]]
                if together and action.kind in (Kind.EF, Kind.EB):
                    break
                needs = inputs(s, action)
                if any(need not in done for need in needs):
                    break
                run(s, max([free[s], *(done[need] for need in needs)]))
                moved = True
        fronts = [actions[at[s]] if at[s] < len(actions) else None for s, actions in enumerate(stages)]
        if (
            together
            and fronts[0] is not None
            and fronts[0].kind in (Kind.EF, Kind.EB)
            and len(set(fronts)) == 1
        ):
            needs = inputs(0, fronts[0])
            if all(need in done for need in needs):
                begin = max([*free, *(done[need] for need in needs)])
                end = begin + max(cost(s, fronts[0]) for s in range(last + 1))
                for s in range(last + 1):
                    run(s, begin)
                    free[s] = end  # a collective: nobody leaves before the slowest
                moved = True
    assert all(at[s] == len(actions) for s, actions in enumerate(stages)), "order deadlocks"
    return Schedule(tuple(map(tuple, stages)), tuple(map(tuple, times)), live_peak(stages))
