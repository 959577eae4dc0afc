"""Properties of random plans: valid, free of deadlock, every item encoded once, every gradient returned
once."""

from collections import Counter

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from unit.plan_cases import plan_of, random_samples

from omni_ds.plan.actions import Action, Kind
from omni_ds.plan.base import LLMWork, time_line
from omni_ds.plan.build import build_step
from omni_ds.plan.fill import EncoderWork, list_schedule, shorter_schedule, smallest_live
from omni_ds.plan.graph import build_graph
from omni_ds.plan.lower import Neighbours, Routes, add_messages, add_step_end
from omni_ds.plan.replay import replay
from omni_ds.plan.reshard import Piece, Transfer, Window
from omni_ds.plan.schedule import uniform
from omni_ds.plan.validate import check_reductions, validate_step

# Without shrinking: a counterexample of 16 stages takes minutes to shrink; the seed is printed.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


@st.composite
def problems(draw):
    """LLM and encoder work: P <= 16, M <= 64 (M < P included), uneven windows, some without media, frozen
    parts."""
    stages, count = draw(st.integers(1, 16)), draw(st.integers(1, 64))
    rng = draw(st.randoms(use_true_random=False))

    def table(top):
        return tuple(tuple(rng.randint(0, top) for _ in range(count)) for _ in range(stages))

    training = draw(st.booleans())
    llm = LLMWork(table(100), table(200) if training else None)
    windows, start = [], 0
    while start < count:
        size = rng.randint(1, max(1, count // 2))
        windows.append(tuple(range(start, min(count, start + size))))
        start += size
    kept = [w for w in range(len(windows)) if rng.random() < 0.8]
    top = draw(st.sampled_from([0, 10, 400]))
    trained = training and draw(st.booleans())
    costs = tuple(tuple(rng.randint(0, top) for _ in range(stages)) for _ in kept)
    encoder = EncoderWork(
        tuple(windows[w] for w in kept),
        costs,
        tuple(tuple(2 * c for c in row) for row in costs) if trained else None,
        tuple(kept),
    )
    routes = [
        [s for s in range(stages) if rng.random() < 0.6] for _ in kept
    ]  # which stages have items of a window
    return llm, encoder, routes


def lowered(llm, encoder, schedule, routes):
    """Actions with messages and the end of the step, one rank a stage, and the window table. The last window
    is the one of the last micro-batch, with media or not."""
    windows = [Window(encoder.number(w), members, ()) for w, members in enumerate(encoder.windows)]
    transfers = [
        Transfer(window.index, source, 0, pieces=(Piece(window.micro_batches[0], 0, 0, 1),))
        for window, sources in zip(windows, routes, strict=True)
        for source in sources
    ]
    table = Routes.of(windows, transfers)
    last = llm.stages - 1
    training = llm.backward is not None
    last_window = encoder.numbers[-1] if encoder.numbers else 0
    if encoder.windows and encoder.windows[-1][-1] < llm.micro_batches - 1:
        last_window += 1
    programs = {
        s: add_step_end(
            add_messages(
                actions,
                s,
                Neighbours(s - 1 if s else None, s + 1 if s < last else None),
                table,
                gradients=encoder.backward is not None,
            ),
            tied=training and last > 0 and s in (0, last),
            llm_trainable=training,
            encoders_trainable=encoder.backward is not None,
            last_window=last_window,
        )
        for s, actions in enumerate(schedule.stages)
    }
    for s, actions in programs.items():
        check_reductions(s, actions)
    return programs, {window.index: window.micro_batches for window in windows}


def collectives(stages, gathers):
    """Groups of one replica; REDUCE is among replicas, which run one program."""

    def group(rank, action):
        if action.kind in (Kind.ER, Kind.NORM, Kind.STEP) or (gathers and action.kind in (Kind.EF, Kind.EB)):
            return tuple(range(stages))
        return (0, stages - 1) if action.kind is Kind.TIED else None

    return group


def check_complete(llm, encoder, schedule):
    numbers = [encoder.number(w) for w in range(len(encoder.windows))]
    expected = [Action(Kind.F, m) for m in range(llm.micro_batches)]
    expected += [Action(Kind.EF, w) for w in numbers]
    if llm.backward is not None:
        expected += [Action(Kind.B, m) for m in range(llm.micro_batches)]
    if encoder.backward is not None:
        expected += [Action(Kind.EB, w) for w in numbers]
    for actions in schedule.stages:
        assert Counter(actions) == Counter(expected)
        for kind in (Kind.EF, Kind.EB):
            assert [a.index for a in actions if a.kind is kind] == sorted(numbers) * any(
                a.kind is kind for a in actions
            )


@settings(max_examples=60, deadline=None, phases=PHASES)
@given(problems(), st.integers(0, 20), st.integers(1, 70), st.sampled_from([0, 500, 10**6]))
def test_joint_schedules(problem, lead, live, overflow):
    llm, encoder, routes = problem
    line = time_line(llm)
    schedule = list_schedule(llm, encoder, line, lead=lead, live=live, overflow=overflow)
    check_complete(llm, encoder, schedule)
    programs, members = lowered(llm, encoder, schedule, routes)
    build_graph(programs, lambda rank, w: members[w], collectives(llm.stages, gathers=False)).order()
    # never better than the LLM alone or the work of the busiest stage; something runs at any time
    assert schedule.length >= max([line.length, *schedule.busy])
    assert schedule.length <= sum(schedule.busy)
    if encoder.backward is not None:
        assert schedule.live == max(live, smallest_live(encoder.windows, llm.stages))
    # the recorded times are those of the order
    assert replay(llm, encoder, schedule.stages).length <= schedule.length

    def within(limit):
        return shorter_schedule(llm, encoder, line, lead=lead, live=live, overflow=overflow, limit=limit)

    assert within(schedule.length) is None and within(schedule.length + 1) == schedule


@settings(max_examples=40, deadline=None, phases=PHASES)
@given(problems(), st.integers(0, 20))
def test_uniform_schedules(problem, lead):
    llm, encoder, routes = problem
    schedule = uniform(llm, encoder, lead=lead)
    check_complete(llm, encoder, schedule)
    programs, members = lowered(llm, encoder, schedule, routes)
    build_graph(programs, lambda rank, w: members[w], collectives(llm.stages, gathers=True)).order()


@settings(max_examples=60, deadline=None, phases=PHASES)
@given(
    pipe=st.integers(1, 4),
    data=st.integers(1, 3),
    count=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    media=st.sampled_from([0.0, 0.2, 0.8]),
    frozen=st.sampled_from(["nothing", "llm", "towers", "encoders"]),
    zero=st.integers(1, 3),
    placement=st.sampled_from(["colocated", "first_stage"]),
    balance=st.sampled_from(["auto", "off"]),
    forward_only=st.booleans(),
    budget=st.sampled_from([200, 1000]),
)
def test_whole_steps(pipe, data, count, seed, media, frozen, zero, placement, balance, forward_only, budget):
    plan = plan_of(
        pipe,
        data,
        llm_trainable=frozen != "llm",
        towers=frozen not in ("towers", "encoders"),
        projectors=frozen != "encoders",
        encoder_zero_stage=zero,
        placement=placement,
        balance_mode=balance,
        max_tokens_per_micro_batch=budget,
    )
    samples = random_samples(plan, count, seed, media)
    step = build_step(plan, 0, samples, forward_only=forward_only)
    validate_step(plan, step)  # counts, items and rows once, pairing, no deadlock, memory bound
    # every message of features is answered by one of gradients, the other way round
    training = not forward_only and plan.encoders_trainable
    for rank in range(plan.mesh.world_size):
        actions = step.actions(rank)
        sent = {(a.index, a.peer) for a in actions if a.kind is Kind.SEND_X}
        returned = {(a.index, a.peer) for a in actions if a.kind is Kind.RECV_G}
        assert returned == (sent if training else set())
