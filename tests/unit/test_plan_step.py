"""build_step end to end on numbers, and the validator's refusals."""

import subprocess
import sys
from dataclasses import replace

import pytest
from unit.plan_cases import plan_of, random_samples

from omni_ds.errors import UserError
from omni_ds.plan.actions import COMPUTE, SENDS, Action, Kind
from omni_ds.plan.build import build_step
from omni_ds.plan.graph import ScheduleError
from omni_ds.plan.sample import SampleMeta
from omni_ds.plan.simulate import Links, simulate
from omni_ds.plan.step import _hash
from omni_ds.plan.validate import plan_graph, validate_step


def kinds(actions):
    return [action.kind for action in actions]


@pytest.mark.parametrize("pipe,data", [(1, 1), (1, 3), (2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("placement", ["colocated", "first_stage"])
@pytest.mark.parametrize("frozen", ["nothing", "llm", "towers", "encoders"])
@pytest.mark.parametrize("forward_only", [False, True])
def test_every_combination_is_valid(pipe, data, zero, placement, frozen, forward_only):
    plan = plan_of(
        pipe,
        data,
        llm_trainable=frozen != "llm",
        towers=frozen not in ("towers", "encoders"),
        projectors=frozen != "encoders",
        encoder_zero_stage=zero,
        placement=placement,
    )
    step = build_step(plan, 3, random_samples(plan, 24, 1), forward_only=forward_only)
    validate_step(plan, step)
    end = kinds(step.actions(pipe * data - 1))
    if forward_only:
        assert not {Kind.B, Kind.EB, Kind.STEP, Kind.SEND_G, Kind.SEND_B} & set(end)
        return
    assert end[-2:] == [Kind.NORM, Kind.STEP]
    assert (Kind.ER in end) == (Kind.EB in end) == (frozen != "encoders")
    assert (Kind.REDUCE in end) == (frozen != "llm")
    assert (Kind.TIED in end) == (pipe > 1 and frozen != "llm")


def test_tied_weights_are_reduced_on_first_and_last_stage_only():
    plan = plan_of(4)
    step = build_step(plan, 0, random_samples(plan, 16, 0))
    assert [Kind.TIED in kinds(step.actions(rank)) for rank in range(4)] == [True, False, False, True]


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("data", [1, 2])
def test_gradients_are_reduced_behind_the_last_backward(data, zero):
    plan = plan_of(4, data, encoder_zero_stage=zero)
    step = build_step(plan, 0, random_samples(plan, 40, 0))
    validate_step(plan, step)
    last_window = len(step.replicas[0].members) - 1
    for rank in range(4 * data):
        actions = step.actions(rank)
        reduce = actions.index(Action(Kind.REDUCE))
        before = [a for a in actions[:reduce] if a.kind not in (*SENDS, Kind.TIED)]
        assert Action(Kind.EB, last_window) in actions[reduce:]
        if Action(Kind.TIED) not in actions:
            assert before[-1].kind is Kind.B
            continue
        # Nothing waits for the first stage that could run before it has its last backward.
        assert actions[reduce - 1] == Action(Kind.TIED)
        assert {a.index for a in actions[reduce:] if a.kind is Kind.EB} == {last_window}


def test_reduction_runs_while_earlier_stages_still_work():
    plan = plan_of(4, 2)
    step = build_step(plan, 0, random_samples(plan, 40, 0))
    times = simulate(plan_graph(plan, step), lambda rank, action: 10 if action.kind in COMPUTE else 1)
    ends = {rank: {action: end for action, _, end in found} for rank, found in times.times.items()}
    last = step.micro_batches - 1
    assert ends[4][Action(Kind.REDUCE)] < ends[0][Action(Kind.B, last)], "stage 2 of 4"


@pytest.mark.parametrize("data", [1, 2])
def test_one_stage_keeps_one_window_alive(data):
    """There is no bubble to encode ahead in, and windows of long images are what fills a GPU's memory."""
    plan = plan_of(1, data)
    step = build_step(plan, 0, random_samples(plan, 40, 0))
    for rank in range(data):
        kinds_ = [a.kind for a in step.actions(rank) if a.kind in (Kind.EF, Kind.EB)]
        assert kinds_ == [Kind.EF, Kind.EB] * (len(kinds_) // 2) and kinds_


def test_llm_passes_are_collectives_from_zero_2_on():
    for zero, together in ((1, set()), (2, {Kind.B}), (3, {Kind.F, Kind.B})):
        plan = plan_of(1, 2, llm_zero_stage=zero)
        assert plan.collective_forward == (zero > 1)
        step = build_step(plan, 0, random_samples(plan, 16, 0))
        graph = validate_step(plan, step)
        found = {graph.action(n).kind for n, ranks in enumerate(graph.members) if len(ranks) == 2}
        assert found & {Kind.F, Kind.B} == together


@pytest.mark.parametrize(
    ("kind", "back", "message"),
    [(Kind.REDUCE, Kind.B, "runs REDUCE before B"), (Kind.ER, Kind.EB, "runs ER before EB")],
)
def test_validator_finds_a_reduction_of_incomplete_gradients(kind, back, message):
    def edit(rank, actions):
        actions.remove(Action(kind))
        last = max(i for i, a in enumerate(actions) if a.kind is back)
        return [*actions[:last], Action(kind), *actions[last:]]

    assert message in _broken(edit)


def test_text_only_step_still_has_one_encoder_pass_on_every_rank():
    plan = plan_of(2, 2)
    step = build_step(plan, 0, random_samples(plan, 16, 0, media=0))
    for rank in range(4):
        assert [a.kind for a in step.actions(rank)].count(Kind.EF) == 1
        assert [a.kind for a in step.actions(rank)].count(Kind.EB) == 1
    assert step.replicas[0].windows[-1].passes == ("image", "audio")
    evaluation = build_step(plan, 0, random_samples(plan, 16, 0, media=0), forward_only=True)
    assert Kind.EF not in kinds(evaluation.actions(0))


def test_zero_3_passes_cover_encoders_used_anywhere_and_are_equal_in_the_world():
    plan = plan_of(2, 2, encoder_zero_stage=3)
    step = build_step(plan, 0, random_samples(plan, 12, 5, media=0.4))
    passes = [tuple(w.passes for w in replica.windows) for replica in step.replicas]
    assert passes[0] == passes[1]
    used = {p.item.encoder for r in step.replicas for w in r.windows for s in w.shares for p in s.items}
    assert {name for names in passes[0] for name in names} == used | {"image", "audio"}
    orders = {tuple(a for a in step.actions(r) if a.kind in (Kind.EF, Kind.EB)) for r in range(4)}
    assert len(orders) == 1


def test_first_stage_keeps_all_items_on_stage_0():
    plan = plan_of(2, 2, placement="first_stage")
    step = build_step(plan, 0, random_samples(plan, 24, 2))
    for replica in step.replicas:
        assert all(
            share.rank == replica.ranks[0] for w in replica.windows for share in w.shares if share.items
        )
        assert all(t.local for t in replica.transfers)
        assert all(len(w.micro_batches) == 1 for w in replica.windows)


@pytest.mark.parametrize("sequence,tensor", [(2, 1), (1, 2), (2, 2), (3, 2)])
@pytest.mark.parametrize("placement", ["colocated", "first_stage"])
def test_rows_go_to_the_shard_and_tensor_rank_that_embeds_them(sequence, tensor, placement):
    plan = plan_of(2, 2, sequence=sequence, tensor=tensor, placement=placement)
    step = build_step(plan, 0, random_samples(plan, 24, 4))
    validate_step(plan, step)
    for replica in step.replicas:
        lanes = sequence * tensor
        for micro_batch in replica.micro_batches:
            rows = dict.fromkeys(range(lanes), 0)
            for t in replica.transfers:
                lane = replica.ranks.index(t.destination)
                assert lane < lanes  # stage 0
                low, high = replica.bounds(micro_batch)[lane // tensor : lane // tensor + 2]
                for piece in t.pieces:
                    if piece.micro_batch == micro_batch.index:
                        assert low <= piece.destination_start and piece.destination_start + piece.rows <= high
                        rows[lane] += piece.rows
            for shard in range(sequence):  # symmetric dispatch
                dealt = [rows[shard * tensor + t] for t in range(tensor)]
                assert max(dealt) - min(dealt) <= 1


def test_micro_batches_unite_all_samples_and_counts_add_up():
    plan = plan_of(2, 3)
    samples = random_samples(plan, 40, 3)
    step = build_step(plan, 7, samples)
    rows = sorted(s.row for r in step.replicas for mb in r.micro_batches for s in mb.samples)
    assert rows == list(range(40))
    assert step.tokens == sum(s.tokens for s in samples) and step.samples == 40 and step.step == 7
    assert step.target_tokens == sum(s.target_tokens for s in samples)
    assert 1 <= step.llm_imbalance < 1.2 and step.encoder_imbalance >= 1 and 0 <= step.bubble_fraction < 1


def test_fewer_samples_than_replicas_gives_empty_micro_batches():
    plan = plan_of(2, 4)
    step = build_step(plan, 0, random_samples(plan, 2, 0))
    validate_step(plan, step)
    assert [sum(mb.tokens for mb in r.micro_batches) > 0 for r in step.replicas].count(False) == 2


def test_hash_is_the_same_in_another_process_and_sees_every_difference():
    program = (
        "from unit.plan_cases import *; from omni_ds.plan.build import build_step; p = plan_of(4, 2);"
        "print(build_step(p, 1, random_samples(p, 30, 4)).hash)"
    )
    plan = plan_of(4, 2)
    samples = random_samples(plan, 30, 4)
    mine = build_step(plan, 1, samples).hash
    for seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": "tests:.", "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(found.stdout) == mine
    assert 0 <= mine < 2**63
    fewer = SampleMeta(samples[0].row, samples[0].tokens, samples[0].target_tokens + 1, samples[0].items)
    others = [
        build_step(plan, 2, samples).hash,
        build_step(plan, 1, samples, forward_only=True).hash,
        build_step(plan, 1, [fewer, *samples[1:]]).hash,
    ]
    assert len({mine, *others}) == 4


def test_hash_sees_slices_spans_and_whose_guests_they_are():
    plan = plan_of(1, 2)
    step = build_step(plan, 1, random_samples(plan, 16, 4))
    first = step.replicas[0]

    def hashed(item=None, guests=first.guests):
        replica = replace(first, guests=guests)
        if item is not None:
            index = next(i for i, mb in enumerate(first.micro_batches) if any(s.items for s in mb.samples))
            batch = first.micro_batches[index]
            at = next(i for i, s in enumerate(batch.samples) if s.items)
            sample = batch.samples[at]
            sample = replace(sample, items=(replace(sample.items[0], **item), *sample.items[1:]))
            samples = (*batch.samples[:at], sample, *batch.samples[at + 1 :])
            batches = list(first.micro_batches)
            batches[index] = replace(batch, samples=samples)
            replica = replace(replica, micro_batches=tuple(batches))
        return _hash(1, [replica], False)

    found = [hashed(), hashed({"gang": 2}), hashed({"gang": 2, "slice": 1}), hashed({"slice": 1})]
    found += [hashed({"spans": ((1, 2),)}), hashed({"spans": ((1, 1), (2, 1))}), hashed({"spans": ((2, 2),)})]
    found += [hashed(guests=g) for g in ((((0, 1),), ()), ((), ((0, 1),)), (((0, 1), (0, 2)), ()))]
    assert len(set(found)) == len(found)


def _broken(edit, **options):
    plan = plan_of(2, 1, **options)
    step = build_step(plan, 0, random_samples(plan, 16, 6))
    validate_step(plan, step)
    replica = step.replicas[0]
    for rank in (0, 1):
        actions = edit(rank, list(step.actions(rank)))
        replica._lowered[rank] = tuple(actions)
    with pytest.raises(ScheduleError) as error:
        validate_step(plan, step)
    return str(error.value)


def _with(replica, **derived):
    """The replica with other windows or transfers than follow from its parts."""
    copied = replace(replica, _lowered={})
    copied.__dict__.update(derived)
    return copied


def test_validator_finds_a_missing_receive_and_marks_the_cell():
    def edit(rank, actions):
        return [a for a in actions if rank == 0 or str(a) != "RF2<0"]

    message = _broken(edit)
    assert "rank 0 sends SF2>1 where rank 1 receives RF3<0" in message and ">RF3<0<" in message


def test_validator_finds_a_doubled_and_a_missing_backward():
    assert "runs B1 2 times" in _broken(lambda r, a: [*a, Action(Kind.B, 1)] if r else a)
    assert "micro-batch 0 lacks" in _broken(lambda r, a: [x for x in a if str(x) != "B0"])


def test_validator_finds_order_faults():
    def swap(first, second):
        def edit(rank, actions):
            if rank == 0:
                i, j = (actions.index(Action.parse(t)) for t in (first, second))
                actions[i], actions[j] = actions[j], actions[i]
            return actions

        return edit

    assert "before F0" in _broken(swap("F0", "B0"))
    assert "before F0" in _broken(swap("F0", "SF0>1"))
    assert "after its consumer" in _broken(swap("RB0<1", "B0"))


def test_validator_finds_a_deadlock_between_stages():
    def edit(rank, actions):
        # stage 1 wants the second forward before it gives back the first gradient, stage 0 the other way
        # round
        compute = [i for i, a in enumerate(actions) if str(a) in ("F1", "RF1<0", "B0", "SB0>0")]
        if rank == 1:
            order = ["RF1<0", "F1", "B0", "SB0>0"]
        else:
            compute = [i for i, a in enumerate(actions) if str(a) in ("F1", "SF1>1", "B0", "RB0<1")]
            order = ["RB0<1", "B0", "F1", "SF1>1"]
        for i, text in zip(sorted(compute), order, strict=True):
            actions[i] = Action.parse(text)
        return actions

    assert "deadlock" in _broken(edit, encoders=False)


def test_validator_finds_collectives_out_of_step():
    def edit(rank, actions):
        return [a for a in actions if rank == 0 or a.kind is not Kind.ER]

    assert "rank 1 enters NORM where rank 0 enters ER" in _broken(edit)


def test_validator_finds_zero_3_passes_in_another_order():
    def edit(rank, actions):
        if rank:
            i, j = [i for i, a in enumerate(actions) if a.kind in (Kind.EF, Kind.EB)][1:3]
            assert actions[i].kind is not actions[j].kind or actions[i].index != actions[j].index
            actions[i], actions[j] = actions[j], actions[i]
        return actions

    assert _broken(edit, encoder_zero_stage=3, micro_batches=8)


def test_validator_finds_an_item_encoded_twice_and_rows_sent_to_the_wrong_place():
    plan = plan_of(2)
    step = build_step(plan, 0, random_samples(plan, 16, 6))
    replica = step.replicas[0]
    window = next(w for w in replica.windows if all(s.items for s in w.shares))
    doubled = replace(window.shares[0], items=window.shares[0].items + window.shares[1].items[:1])
    windows = tuple(
        replace(w, shares=(doubled, *w.shares[1:])) if w is window else w for w in replica.windows
    )
    with pytest.raises(ScheduleError, match="encoded 2 times instead of once"):
        validate_step(plan, replace(step, replicas=(_with(replica, windows=windows),)))
    first = replica.transfers[0]
    piece = replace(first.pieces[0], destination_start=first.pieces[0].destination_start + 1)
    moved = (replace(first, pieces=(piece, *first.pieces[1:])), *replica.transfers[1:])
    with pytest.raises(ScheduleError, match="times instead of"):
        validate_step(plan, replace(step, replicas=(_with(replica, transfers=moved),)))


def test_plan_refuses_what_cannot_run():
    with pytest.raises(UserError, match="needs one"):
        plan_of(4, layers=3)
    with pytest.raises(UserError, match="nothing to train"):
        plan_of(2, llm_trainable=False, towers=False, projectors=False)
    with pytest.raises(UserError, match="placement"):
        plan_of(2, placement="last_stage")


def test_simulation_agrees_with_the_schedule_and_counts_messages():
    plan = plan_of(4)
    step = build_step(plan, 0, random_samples(plan, 32, 8))
    graph = validate_step(plan, step)
    schedule = step.replicas[0].schedule
    planned = {
        (stage, action): end - start
        for stage, (actions, times) in enumerate(zip(schedule.stages, schedule.times, strict=True))
        for action, (start, end) in zip(actions, times, strict=True)
    }

    def cost(rank, action):
        return planned.get((plan.mesh.coords(rank).pipe, action), 0)

    free = simulate(graph, cost)
    # Receives are posted one action ahead and messages are free: nothing but that can make it longer.
    assert schedule.length <= free.length <= 1.02 * schedule.length
    for rank in range(4):
        busy = sum(end - start for _, start, end in free.times[rank])
        assert busy + sum(free.idle[rank].values()) == free.length
    slow = simulate(graph, cost, links=Links(latency=schedule.length // 100))
    assert slow.length > free.length
    assert max(free.peak_micro_batches.values()) <= 4
    assert "activations" in free.idle[3]


def test_reorder_groups_keep_their_samples():
    plan = plan_of(2, 4, group_size=2)
    samples = random_samples(plan, 40, 6)
    step = build_step(plan, 0, samples)
    validate_step(plan, step)
    for group, rows in ((0, range(20)), (1, range(20, 40))):
        replicas = step.replicas[2 * group : 2 * group + 2]
        assert sorted(s.row for r in replicas for mb in r.micro_batches for s in mb.samples) == list(rows)
    with pytest.raises(UserError, match=r"group_size 3 .* 4 .* 2 or 4"):
        plan_of(2, 4, group_size=3)
