"""ZeRO stages, offloading and recomputation of the LLM equal one process; bounds as in test_layouts.

The persistence threshold is 0: these weights are so small that ZeRO-3 would keep all of them whole.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from parity.test_layouts import check, config_for, layout
from ranks import run_ranks

ZERO_3 = ("zero_optimization.stage=3", "zero_optimization.stage3_param_persistence_threshold=0")
OFFLOAD = 'zero_optimization.offload_optimizer={"device":"cpu"}'
OFFLOAD_WEIGHTS = 'zero_optimization.offload_param={"device":"cpu"}'
RECOMPUTE = "pipeline.activation_checkpoint_interval="


def zero(stage: int) -> tuple[str, ...]:
    return ZERO_3 if stage == 3 else (f"zero_optimization.stage={stage}",)


CASES = [
    pytest.param(layout(1, "colocated", 2, *zero(0)), False, id="zero0"),
    pytest.param(layout(1, "colocated", 3, *zero(2), RECOMPUTE + "2"), True, id="zero2-tied-blocks"),
    pytest.param(layout(1, "colocated", 2, *zero(3), RECOMPUTE + "3"), True, id="zero3-tied-blocks"),
    pytest.param(
        layout(1, "colocated", 1, *zero(3), OFFLOAD, OFFLOAD_WEIGHTS, RECOMPUTE + "1"),
        False,
        id="zero3-offload-recompute",
    ),
    pytest.param(layout(2, "colocated", 2, *zero(1), OFFLOAD), True, id="pp2-zero1-tied-offload"),
]
MORE = [  # the first two: resumed below, and in the matrix of layouts
    pytest.param(layout(1, "colocated", 2, *zero(2), OFFLOAD), False, id="zero2-offload"),
    pytest.param(layout(2, "colocated", 2, *zero(0), RECOMPUTE + "2"), True, id="pp2-zero0-tied-blocks"),
    pytest.param(layout(1, "colocated", 2, *zero(1), OFFLOAD), False, id="zero1-offload"),
    pytest.param(layout(1, "colocated", 1, *zero(2)), False, id="zero2"),
    pytest.param(layout(1, "colocated", 3, *zero(3)), False, id="zero3-encoders-too"),
    pytest.param(layout(1, "colocated", 2, *zero(3), OFFLOAD), True, id="zero3-tied-offload"),
]


@pytest.mark.parametrize(("overrides", "tied"), CASES)
def test_equals_one_process(overrides: tuple[str, ...], tied: bool) -> None:
    check("nothing", 2, overrides, tied=tied)


@pytest.mark.full
@pytest.mark.parametrize(("overrides", "tied"), MORE)
def test_more_equal_one_process(overrides: tuple[str, ...], tied: bool) -> None:
    check("nothing", 2, overrides, tied=tied)


def _continue(
    config: str, overrides: tuple[str, ...], others: tuple[tuple[str, ...], ...], folder: str
) -> dict[str, Any]:
    """Save after two steps and go on for one; do that one again in new engines that load what was saved.

    Returns ``expected`` and ``found`` (by the overrides of the second engines): loss, norm and fragments of
    whole weights after the third step; ``whole``: LLM weights that were not sharded between steps.
    """
    from omni_ds.config.load import load_config
    from omni_ds.engine.launch import assemble
    from omni_ds.engine.metrics import Reporter
    from omni_ds.engine.step_input import prepare
    from omni_ds.engine.trainer import Trainer

    def start(layout: tuple[str, ...]):
        run = assemble(load_config(config, (*layout, f"omni.output_dir={folder}")))
        return run, Trainer(run.config, run.runtime, {}, run.fingerprint(), Reporter(run.config, 1))

    def steps(run, first: int, last: int) -> tuple[float, float, dict[str, torch.Tensor]]:
        for batch in run.batches(first, last):
            result = run.runtime.executor.run(prepare(batch, run.runtime.rank, (), run.runtime.device))
        return result.loss, result.grad_norm, weights(run)

    def weights(run) -> dict[str, torch.Tensor]:
        from omni_ds.checkpoint.full_weights import full_parameters

        runtime = run.runtime
        found = full_parameters(runtime.module.held(), runtime.groups.shards)
        return {name: tensor.clone() for name, tensor in found}

    run, trainer = start(overrides)
    steps(run, 0, 2)
    trainer.save(2)
    held = [h.parameter for h in run.runtime.module.held()]
    whole = sum(p.numel() == getattr(p, "ds_numel", p.numel()) for p in held)
    expected, found = steps(run, 2, 3), {}
    for other in others:
        again, trainer = start(other)
        trainer.resume(Path(folder) / "checkpoints" / "step-00000002")
        found[other] = steps(again, 2, 3)
    return {"expected": expected, "found": found, "whole": whole}


@pytest.mark.parametrize(
    ("stage", "more", "other"),
    [(0, (), 3), (2, (OFFLOAD,), 0), (3, (), 2)],
    ids=["zero0-to-3", "zero2-offload-to-0", "zero3-to-2"],
)
def test_resumed_equals_uninterrupted(tmp_path: Path, stage: int, more: tuple[str, ...], other: int) -> None:
    """Bit for bit in the same layout; in another one up to the order of sums."""
    same, another = (layout(1, "colocated", 2, *zero(each)) for each in (stage, other))
    same = (*same, *more)
    results = run_ranks(
        _continue, 2, str(config_for("nothing")), same, (same, another), str(tmp_path / "run"), timeout=180
    )
    for result in results:
        loss, norm, weights = result["expected"]
        assert result["found"][same][:2] == (loss, norm)
        assert all(torch.equal(result["found"][same][2][name], weights[name]) for name in weights)
        assert result["found"][another][:2] == pytest.approx((loss, norm), rel=1e-5)
        differences = [(result["found"][another][2][n] - w).abs().max().item() for n, w in weights.items()]
        assert max(differences, default=0.0) < 1e-6
        assert result["whole"] == 0 or stage < 3


def _started(config: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Of engines that have just been built: LLM weights in fp32; and of each layer sharded on the way,
    how many elements were whole afterwards."""
    from omni_ds.checkpoint.full_weights import full_parameters
    from omni_ds.config.load import load_config
    from omni_ds.engine import sharding
    from omni_ds.engine.launch import assemble

    shard, left = sharding.Sharder.shard, []

    def watched(sharder, layer):
        shard(sharder, layer)
        left.append(sum(parameter.numel() for parameter in layer.parameters()))

    sharding.Sharder.shard = watched
    runtime = assemble(load_config(config, overrides)).runtime
    found = full_parameters(runtime.module.held(), runtime.groups.shards)
    return {"left": left, "weights": {name: tensor.clone() for name, tensor in found}}


def test_sharded_while_read_and_masters_are_exact() -> None:
    """Each layer is in shards before the next is read, and bf16 loses nothing of an fp32 checkpoint."""
    config = str(config_for("nothing"))
    exact = run_ranks(_started, 1, config, layout(1), timeout=120)[0]
    found = run_ranks(
        _started, 2, config, layout(1, "colocated", 2, *zero(3), "bf16.enabled=true"), timeout=120
    )
    assert not exact["left"] and all(f["left"] and not any(f["left"]) for f in found)
    weights = next(f["weights"] for f in found if f["weights"])
    assert weights.keys() == exact["weights"].keys()
    assert [name for name in weights if not weights[name].equal(exact["weights"][name])] == []
