"""bf16 weights and activations with fp32 accumulation and master weights, against fp32 and between layouts.

Bounds, with u = 2^-9 the relative error of one rounding to bf16:

- loss within u / 2 = 1e-3 of fp32: logits carry a few u each, of either sign; the mean over the targets
  averages them, so its error is a fraction of one rounding.
- gradient norm within 4 u = 8e-3: one rounding of each parameter's gradient in a micro-batch is random and
  vanishes in a norm over thousands; what stays is the common error of the activations, a few u.
- the update (final minus initial weights, as one vector) within 5 %: gradients of single weights are off by
  several u, AdamW normalises small ones to full steps.
- between layouts half of that: they round the same values and differ in the order of sums, which are fp32.
  Accumulating eight micro-batches in bf16 would add a rounding of the running sum each.

The frozen sinusoids of Whisper are left out of the weights: they have no fp32 master.
"""

import functools
from typing import Any

import pytest
import torch
from parity.test_layouts import config_for, layout
from parity.test_zero import OFFLOAD, OFFLOAD_WEIGHTS, ZERO_3
from ranks import run_ranks
from worker import merge_weights, train_and_collect

ROUNDING = 2.0**-9
BF16 = "bf16.enabled=true"
ONE = (1, layout(1, "colocated", 2, BF16))
SPLIT = (2, layout(2, "colocated", 3, BF16))
SHARDED = (2, layout(1, "colocated", 2, BF16, *ZERO_3))
TENSOR = (2, layout(1, "colocated", 2, BF16, "tensor_parallel.autotp_size=2"))
SEQUENCE = (4, layout(2, "colocated", 2, BF16, "sequence_parallel_size=2"))
MORE = [
    (4, layout(1, "colocated", 2, BF16, "tensor_parallel.autotp_size=2", "sequence_parallel_size=2")),
    (2, layout(1, "colocated", 2, BF16, "zero_optimization.stage=2")),
    (2, layout(1, "colocated", 2, BF16, "zero_optimization.stage=2", OFFLOAD)),
    (2, layout(2, "colocated", 2, BF16, OFFLOAD)),
    (2, layout(1, "colocated", 2, BF16, *ZERO_3, OFFLOAD, OFFLOAD_WEIGHTS)),
    (2, layout(2, "colocated", 1, BF16)),
    (2, layout(1, "colocated", 2, BF16)),
    (4, layout(2, "first_stage", 2, BF16)),
    (4, layout(4, "colocated", 3, BF16)),
]


@functools.cache
def train(world: int, overrides: tuple[str, ...]) -> dict[str, Any]:
    results = run_ranks(train_and_collect, world, str(config_for("nothing")), overrides, timeout=120)
    final, initial = merge_weights(results, "final"), merge_weights(results, "initial")
    return results[0] | {"final": final, "initial": initial}


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Norm of a - b over all trained weights."""
    assert a.keys() == b.keys()
    squares = [
        (a[name].double() - b[name].double()).square().sum() for name in a if "embed_positions" not in name
    ]
    return float(torch.stack(squares).sum().sqrt())


def check(found: dict[str, Any], expected: dict[str, Any], share: float) -> None:
    """``share`` of the bounds against fp32."""
    assert found["losses"] == pytest.approx(expected["losses"], rel=share * ROUNDING / 2)
    assert found["norms"] == pytest.approx(expected["norms"], rel=share * 4 * ROUNDING)
    update = difference(expected["final"], expected["initial"])
    assert update > 0
    assert difference(found["final"], expected["final"]) < share * 0.05 * update


def test_bf16_is_near_fp32() -> None:
    exact = train(1, layout(1))
    found = train(*ONE)
    assert found["losses"] != exact["losses"], "bf16 was not on"
    check(found, exact, share=1.0)


@pytest.mark.parametrize(
    "found",
    [SPLIT, SHARDED, TENSOR, pytest.param(SEQUENCE, marks=pytest.mark.full)],
    ids=["pipeline", "LLM ZeRO-3", "tensor", "pipeline and sequence"],
)
def test_bf16_layouts_agree(found: tuple[int, tuple[str, ...]]) -> None:
    check(train(*found), train(*ONE), share=0.5)


@pytest.mark.parametrize("at_once", ["true", "false"])
def test_slices_of_images_are_counted(at_once: str) -> None:
    """Their passes are not those of DeepSpeed's engine, which adds gradients up behind its own."""
    more = ("omni.encoder_parallel.long_short=8", f"bf16.immediate_grad_update={at_once}")
    found = train(2, layout(1, "colocated", 2, BF16, *more))
    assert found["slices"] > 0
    check(found, train(*ONE), share=0.5)


def _norms_without_gradients(config: str, overrides: tuple[str, ...]) -> list[float]:
    """Gradient norm of a step, and of what the next one has before any backward."""
    from omni_ds.config.load import load_config
    from omni_ds.engine.launch import assemble
    from omni_ds.engine.step_input import prepare

    run = assemble(load_config(config, overrides))
    runtime = run.runtime
    (batch,) = run.batches(0, 1)
    norm = runtime.executor.run(prepare(batch, runtime.rank, (), runtime.device)).grad_norm
    runtime.encoders.begin_step([])
    runtime.encoders.reduce()
    norms = [norm, float(runtime.llm.squared_norm()), float(runtime.encoders.squared_norm())]
    for optimizer in (runtime.llm.optimizer, runtime.encoders.engine.optimizer):
        norms += [float(part.abs().max()) for part in optimizer.fp32_groups_gradient_flat_partition]
    return norms


def test_nothing_is_left_of_an_earlier_step() -> None:
    """Sums are overwritten, not zeroed: a part that a step does not reach must not find the last one's."""
    ((norm, *after),) = run_ranks(
        _norms_without_gradients, 1, str(config_for("nothing")), ONE[1], timeout=120
    )
    assert norm > 0 and len(after) > 2 and not any(after)


def _sums_around_reduction(
    config: str, overrides: tuple[str, ...]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sums of gradients before and after what would add those of other ranks, of LLM and encoders."""
    from omni_ds.config.load import load_config
    from omni_ds.engine.launch import assemble
    from omni_ds.engine.step_input import prepare

    run = assemble(load_config(config, overrides))
    runtime, sums = run.runtime, []

    def watch(engine: Any, optimizer: Any) -> None:
        reduce = engine.reduce

        def watched() -> None:
            engine.adapter.fill_missing(p for group in optimizer.bf16_groups for p in group)
            for flat in optimizer.fp32_groups_gradients_flat:
                flat.mul_(1 + 2.0**-12)  # what bf16 does not have
            before = torch.cat(list(optimizer.fp32_groups_gradients_flat)).clone()
            reduce()
            sums.append((before, torch.cat(list(optimizer.fp32_groups_gradients_flat)).clone()))

        engine.reduce = watched

    watch(runtime.llm, runtime.llm.optimizer)
    watch(runtime.encoders, runtime.encoders.engine.optimizer)
    (batch,) = run.batches(0, 1)
    runtime.executor.run(prepare(batch, runtime.rank, (), runtime.device))
    return sums


def test_sums_of_one_rank_stay_as_they_are() -> None:
    """DeepSpeed rounds what it sends to bf16, also to nobody."""
    (sums,) = run_ranks(_sums_around_reduction, 1, str(config_for("nothing")), ONE[1], timeout=120)
    assert len(sums) == 2
    for before, after in sums:
        assert not torch.equal(before, before.bfloat16().float())
        assert torch.equal(before, after)


@pytest.mark.full
@pytest.mark.parametrize(("world", "overrides"), MORE)
def test_more_bf16_layouts_agree(world: int, overrides: tuple[str, ...]) -> None:
    check(train(world, overrides), train(*ONE), share=0.5)
