"""A step whose gradient norm is not finite changes no weight, in either engine."""

import math
import tempfile
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tiny import config_dict, make_checkpoints, write_config


def _lost() -> torch.Tensor:
    return torch.tensor(math.nan, dtype=torch.float64)


def _train_with_a_bad_step(
    config: str, overrides: tuple[str, ...]
) -> tuple[list[bool], list[bool], list[bool]]:
    """Three steps, the second with its norm lost: (skipped, weights changed, finite) by step."""
    from omni_ds.checkpoint.full_weights import full_parameters
    from omni_ds.config.load import load_config
    from omni_ds.engine.launch import assemble
    from omni_ds.engine.step_input import prepare

    run = assemble(load_config(config, overrides))
    runtime = run.runtime
    executor = runtime.executor
    measured = executor._encoders.squared_norm

    def weights() -> dict[str, torch.Tensor]:
        found = {n: t.clone() for n, t in full_parameters(runtime.module.held(), runtime.groups.shards)}
        with runtime.encoders.ranks.active():
            found |= {n: t.clone() for n, t in full_parameters(runtime.encoder_parameters())}
        return found

    skipped, changed, finite = [], [], []
    for number, batch in enumerate(run.batches(0, 3)):
        before = weights()
        executor._encoders.squared_norm = _lost if number == 1 else measured
        skipped.append(executor.run(prepare(batch, runtime.rank, (), runtime.device)).skipped)
        after = weights()
        changed.append(any(not torch.equal(before[name], after[name]) for name in before))
        finite.append(all(bool(tensor.isfinite().all()) for tensor in after.values()))
    return skipped, changed, finite


@pytest.mark.parametrize(
    "overrides",
    [
        ("omni.encoder_parallel.zero_stage=2",),
        ("omni.encoder_parallel.zero_stage=3",),
        ("bf16.enabled=true",),
        pytest.param(
            ("bf16.enabled=true", "bf16.check_grad_overflow=false", "data_types.grad_accum_dtype=bf16"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_no_weight_changes(overrides: tuple[str, ...]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="skip-"))
    make_checkpoints(folder)
    config = write_config(config_dict(folder, folder / "run"), folder / "config.json")
    for skipped, changed, finite in run_ranks(
        _train_with_a_bad_step, 2, str(config), ("pipeline.stages=2", *overrides), timeout=120
    ):
        assert skipped == [False, True, False]
        assert changed == [True, False, True]
        assert finite == [True] * 3
