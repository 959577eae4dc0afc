"""Proofs about a step plan before it runs: everything happens once, in a legal order, and nothing can hang.

`validate_step` raises ScheduleError; its message ends with the rank x order grid, the wrong cell marked
>like this<.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from omni_ds.plan.actions import COMPUTE, LLM_COMPUTE, RECEIVES, SENDS, Action, Kind
from omni_ds.plan.graph import CONSUMER, ActionGraph, ScheduleError, build_graph
from omni_ds.plan.render import order_grid
from omni_ds.plan.simulate import peak_live

if TYPE_CHECKING:
    from omni_ds.plan.plan import Plan, ReplicaPlan, StepPlan

PRODUCER = {Kind.SEND_F: (Kind.F,), Kind.SEND_B: (Kind.B, Kind.I), Kind.SEND_X: (Kind.EF,)}


def validate_step(plan: Plan, step_plan: StepPlan) -> ActionGraph:
    """Check a whole step, all ranks; returns its graph (for the simulation). ScheduleError when anything is
    wrong."""
    programs = {rank: step_plan.actions(rank) for rank in range(plan.mesh.world_size)}
    try:
        for replica in step_plan.replicas:
            check_items(replica)
            check_transfers(replica)
        for rank, actions in programs.items():
            replica = step_plan.replica_of(rank)
            check_counts(plan, step_plan, rank, actions)
            check_order(rank, actions, {w.index: w.micro_batches for w in replica.windows})
            check_local(rank, actions, replica)
        graph = plan_graph(plan, step_plan)
        graph.order()
        for rank, actions in programs.items():
            check_memory(plan, step_plan.replica_of(rank), rank, actions)
    except ScheduleError as error:
        raise ScheduleError(f"{error}\n{order_grid(programs, mark=error.where)}", error.where) from None
    return graph


def plan_graph(plan: Plan, step_plan: StepPlan) -> ActionGraph:
    """The dependency graph of all ranks of a step."""
    mesh = plan.mesh
    world = tuple(range(mesh.world_size))
    zero = {rank: group for group in mesh.zero_groups() for rank in group}
    members = [{w.index: w.micro_batches for w in replica.windows} for replica in step_plan.replicas]
    gathers = plan.gathers_encoders
    # ZeRO-2 reduces in every backward, ZeRO-3 gathers in every forward too.
    together = (frozenset(), frozenset(), frozenset({Kind.B}), LLM_COMPUTE)[plan.options.llm_zero_stage]

    def group(rank: int, action: Action) -> Sequence[int] | None:
        if action.kind in (Kind.ER, Kind.NORM, Kind.STEP):
            return world
        if action.kind is Kind.REDUCE or action.kind in together:
            return zero[rank]
        if action.kind is Kind.TIED:
            c = mesh.coords(rank)
            ends = (0, mesh.pipe - 1)
            return [mesh.rank(pipe=p, data=c.data, sequence=c.sequence, tensor=c.tensor) for p in ends]
        if gathers and action.kind in (Kind.EF, Kind.EB):
            return world
        return None

    programs = {rank: step_plan.actions(rank) for rank in world}
    return build_graph(programs, lambda rank, w: members[mesh.coords(rank).data][w], group)


def check_items(replica: ReplicaPlan) -> None:
    """Every item of the micro-batches is in exactly one share, at its place, of a window that holds its
    micro-batch."""
    wanted: Counter = Counter()
    for micro_batch in replica.micro_batches:
        for sample, position in zip(micro_batch.samples, micro_batch.cu_seqlens, strict=False):
            wanted.update((item, micro_batch.index, position) for item in sample.items)
    planned: Counter = Counter()
    for window in replica.windows:
        for share in window.shares:
            for placed in share.items:
                if placed.micro_batch not in window.micro_batches:
                    raise ScheduleError(
                        f"window {window.index} encodes an item of micro-batch {placed.micro_batch}"
                    )
                planned[placed.item, placed.micro_batch, placed.position] += 1
    if wanted != planned:
        (item, m, _), _ = next(iter(((wanted - planned) + (planned - wanted)).items()))
        raise ScheduleError(
            f"item {item.ordinal} of row {item.row} in micro-batch {m} is encoded "
            f"{sum(n for (i, k, _), n in planned.items() if i == item and k == m)} times instead of once"
        )


def check_transfers(replica: ReplicaPlan) -> None:
    """Every feature row of every share is moved once, to the packed positions of its placeholders, on the
    rank of the first stage that holds that part of the sequence."""
    by_index = {mb.index: replica.bounds(mb) for mb in replica.micro_batches}
    wanted: Counter = Counter()
    for window in replica.windows:
        for share in window.shares:
            row = 0
            for placed in share.items:
                for offset, length in placed.item.spans:
                    for i in range(length):
                        wanted[
                            window.index, share.rank, row, placed.micro_batch, placed.position + offset + i
                        ] += 1
                        row += 1
    moved: Counter = Counter()
    for t in replica.transfers:
        shard = replica.ranks.index(t.destination) // replica.tensor
        for p in t.pieces:
            bounds = by_index[p.micro_batch]
            if shard >= replica.sequence or not (
                bounds[shard] <= p.destination_start and p.destination_start + p.rows <= bounds[shard + 1]
            ):
                raise ScheduleError(
                    f"rows for tokens {p.destination_start} to {p.destination_start + p.rows} of micro-batch "
                    f"{p.micro_batch} are sent to rank {t.destination}, which does not hold them"
                )
            for i in range(p.rows):
                moved[t.window, t.source, p.source_start + i, p.micro_batch, p.destination_start + i] += 1
    if wanted != moved:
        w, rank, row, m, token = next(iter((wanted - moved) + (moved - wanted)))
        raise ScheduleError(
            f"feature row {row} of window {w} on rank {rank} is moved to token {token} of micro-batch {m} "
            f"{moved[w, rank, row, m, token]} times instead of {wanted[w, rank, row, m, token]}"
        )


def check_counts(plan: Plan, step_plan: StepPlan, rank: int, actions: Sequence[Action]) -> None:
    """Each micro-batch and each planned window exactly once forward and, in training, once backward."""
    counts = Counter(actions)
    for action, n in counts.items():
        if n > 1:
            first = actions.index(action)
            raise ScheduleError(
                f"rank {rank} runs {action} {n} times", (rank, actions.index(action, first + 1))
            )
    training = not step_plan.forward_only
    for m in range(step_plan.micro_batches):
        backward = [k for k in (Kind.B, Kind.I, Kind.W) if counts[Action(k, m)]]
        if not counts[Action(Kind.F, m)] or backward not in (
            [[Kind.B], [Kind.I, Kind.W]] if training else [[]]
        ):
            raise ScheduleError(
                f"rank {rank}: micro-batch {m} lacks its forward or backward, or has one too many"
            )
    forwards = {a.index for a in actions if a.kind is Kind.EF}
    backwards = {a.index for a in actions if a.kind is Kind.EB}
    needed = {w.index for w in step_plan.replica_of(rank).windows if w.share(rank).items or w.passes}
    if needed - forwards:
        raise ScheduleError(f"rank {rank} never encodes window {min(needed - forwards)}")
    expected = forwards if training and plan.encoders_trainable else set()
    if backwards != expected:
        raise ScheduleError(f"rank {rank}: EB of windows {sorted(backwards)} instead of {sorted(expected)}")


def check_order(rank: int, actions: Sequence[Action], windows: Mapping[int, Sequence[int]]) -> None:
    """Producers before sends, receives before consumers, forwards before backwards, windows in ascending
    order."""
    at = {(a.kind, a.index): i for i, a in enumerate(actions) if a.kind in COMPUTE}

    def before(kind: Kind, action: Action, position: int) -> None:
        if at.get((kind, action.index), len(actions)) > position:
            raise ScheduleError(
                f"rank {rank} runs {action} before {kind.value}{action.index}", (rank, position)
            )

    latest = {Kind.EF: -1, Kind.EB: -1}
    for i, a in enumerate(actions):
        if a.kind in (Kind.B, Kind.I):
            before(Kind.F, a, i)
        elif a.kind is Kind.W:
            before(Kind.I, a, i)
        elif a.kind is Kind.EB:
            before(Kind.EF, a, i)
        elif a.kind in PRODUCER:
            kinds = [k for k in PRODUCER[a.kind] if (k, a.index) in at]
            before(kinds[0] if kinds else PRODUCER[a.kind][0], a, i)
        elif a.kind is Kind.SEND_G:
            if any(max(at.get((k, m), -1) for k in (Kind.B, Kind.I)) > i for m in windows[a.index]):
                raise ScheduleError(f"rank {rank} runs {a} before the last backward of its window", (rank, i))
        elif a.kind in RECEIVES:
            users = windows[a.index] if a.kind is Kind.RECV_X else (a.index,)
            if not any(at.get((k, u), -1) > i for k in CONSUMER[a.kind] for u in users):
                raise ScheduleError(f"rank {rank} posts {a} after its consumer", (rank, i))
        if a.kind in latest:
            if a.index <= latest[a.kind]:
                raise ScheduleError(f"rank {rank} runs {a} out of window order", (rank, i))
            latest[a.kind] = a.index
    check_reductions(rank, actions)


def check_reductions(rank: int, actions: Sequence[Action]) -> None:
    """Gradients are complete when they are reduced: TIED and REDUCE after the last backward of the LLM, in
    that order, ER after that of the encoders, and all of them before the norm."""
    needs = {
        Kind.TIED: (Kind.B, Kind.I, Kind.W),
        Kind.REDUCE: (Kind.B, Kind.I, Kind.W, Kind.TIED),
        Kind.ER: (Kind.EB,),
        Kind.NORM: (Kind.TIED, Kind.REDUCE, Kind.ER),
        Kind.STEP: (Kind.NORM,),
    }
    last = {a.kind: i for i, a in enumerate(actions)}
    for i, a in enumerate(actions):
        for kind in needs.get(a.kind, ()):
            if last.get(kind, -1) > i:
                raise ScheduleError(f"rank {rank} runs {a} before {actions[last[kind]]}", (rank, i))


def check_local(rank: int, actions: Sequence[Action], replica: ReplicaPlan) -> None:
    """Features that stay on a rank have no message to wait for: the order of the program has to do it."""
    at = {(a.kind, a.index): i for i, a in enumerate(actions) if a.kind in COMPUTE}
    for t in replica.transfers:
        if not t.local or t.source != rank:
            continue
        for m in {p.micro_batch for p in t.pieces}:
            if at[Kind.EF, t.window] > at[Kind.F, m]:
                raise ScheduleError(f"rank {rank} runs F{m} before EF{t.window}", (rank, at[Kind.F, m]))
            done = max(at.get((Kind.B, m), -1), at.get((Kind.I, m), -1))
            if (Kind.EB, t.window) in at and at[Kind.EB, t.window] < done:
                raise ScheduleError(
                    f"rank {rank} runs EB{t.window} before B{m}", (rank, at[Kind.EB, t.window])
                )


def check_memory(plan: Plan, replica: ReplicaPlan, rank: int, actions: Sequence[Action]) -> None:
    """Live micro-batches as 1F1B promises (stages - stage), live windows within the schedule's bound."""
    stage = plan.mesh.coords(rank).pipe
    compute = tuple(a for a in actions if a.kind not in SENDS and a.kind not in RECEIVES)
    micro_batches, windows = peak_live(compute)
    if micro_batches > plan.mesh.pipe - stage:
        raise ScheduleError(
            f"rank {rank} holds {micro_batches} micro-batches, 1F1B allows {plan.mesh.pipe - stage}"
        )
    if windows > replica.live:
        raise ScheduleError(f"rank {rank} holds {windows} encoder windows, the bound is {replica.live}")
