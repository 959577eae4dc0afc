"""Any layout equals one process: losses, norms and weights against a plain PyTorch loop over HF modules.

Bounds, fp32: losses and norms 1e-4 relative (1e-6 is usual), weights 1e-5 absolute (1e-7 is usual). AdamW's
eps is 1e-4, so that gradients of zero up to rounding do not become steps of full size.
"""

import functools
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from parity.reference import train_reference
from ranks import run_ranks
from tiny import config_dict, make_checkpoints, merged, write_config
from worker import largest_difference, merge_weights, train_and_collect

STEPS = 3
FREEZE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "llm": {"llm": {"freeze": True}},
    "towers": {"encoders": {"vision": {"freeze": True}, "audio": {"freeze": True}}},
    "projectors": {
        "encoders": {"vision": {"projector": {"freeze": True}}, "audio": {"projector": {"freeze": True}}}
    },
    "one encoder": {"encoders": {"vision": {"freeze": True, "projector": {"freeze": True}}}},
    "encoders": {
        "encoders": {
            "vision": {"freeze": True, "projector": {"freeze": True}},
            "audio": {"freeze": True, "projector": {"freeze": True}},
        }
    },
    "all but projectors": {
        "llm": {"freeze": True},
        "encoders": {"vision": {"freeze": True}, "audio": {"freeze": True}},
    },
}


@functools.cache
def folder(tied: bool = False) -> Path:
    path = Path(tempfile.mkdtemp(prefix="parity-"))
    make_checkpoints(path, tied=tied)
    return path


def config_for(freeze: str, tied: bool = False, **changes: Any) -> Path:
    checkpoints = folder(tied)
    raw = merged(config_dict(checkpoints, checkpoints / "run", **FREEZE[freeze]), changes)
    name = f"{freeze.replace(' ', '_')}-{zlib.crc32(str(changes).encode()):08x}"
    return write_config(raw, checkpoints / f"{name}.json")


@functools.cache
def reference(freeze: str, tied: bool = False) -> dict[str, Any]:
    """The plain loop, once for each freeze pattern; in a child, so that this process can still fork."""
    return run_ranks(_reference, 1, str(config_for(freeze, tied)), str(folder(tied)), timeout=120)[0]


def _reference(config_path: str, checkpoints: str) -> dict[str, Any]:
    from omni_ds.config.load import load_config
    from omni_ds.engine.launch import assemble

    run = assemble(load_config(config_path))
    initial = {h.name: h.parameter.detach().float().clone() for h in run.runtime.encoder_parameters()}
    return train_reference(run.config, run.dataset, run.sampler, Path(checkpoints), initial, STEPS)


def check(freeze: str, world: int, overrides: tuple[str, ...], tied: bool = False) -> list[dict[str, Any]]:
    config = config_for(freeze, tied)
    results = run_ranks(train_and_collect, world, str(config), overrides, timeout=120)
    expected = reference(freeze, tied)
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-4), result["rank"]
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-4), result["rank"]
    final = merge_weights(results, "final")
    # The reference also holds what is not built: layers above the feature layer.
    difference, where = largest_difference(final, {n: expected["final"][n] for n in final})
    assert difference < 1e-5, where
    moved, _ = largest_difference(final, merge_weights(results, "initial"))
    assert moved > 1e-4, "nothing was trained"
    return results


def layout(stages: int, placement: str = "colocated", zero: int = 2, *more: str) -> tuple[str, ...]:
    return (
        f"pipeline.stages={stages}",
        f"omni.encoder_parallel.placement={placement}",
        f"omni.encoder_parallel.zero_stage={zero}",
        *more,
    )


# A pairwise cover of {ranks x stages, placement, encoder ZeRO, freeze pattern}.
PAIRWISE = [
    ("nothing", 1, layout(1)),
    ("nothing", 2, layout(2, zero=3)),
    ("nothing", 4, layout(2, zero=1)),
    ("llm", 2, layout(2, zero=2)),
    ("llm", 2, layout(1, "first_stage", 3)),
    ("towers", 4, layout(4, zero=2)),
    ("towers", 2, layout(1, zero=1)),
    ("projectors", 2, layout(2, "first_stage", 1)),
    ("one encoder", 4, layout(2, "colocated", 3)),
    ("one encoder", 2, layout(2, "first_stage", 2)),
    ("towers", 4, layout(2, "first_stage", 3)),
    ("encoders", 2, layout(2)),
    ("all but projectors", 4, layout(2, zero=3)),
    ("all but projectors", 1, layout(1, "first_stage", 1)),
]


@pytest.mark.parametrize(("freeze", "world", "overrides"), PAIRWISE)
def test_layout_equals_one_process(freeze: str, world: int, overrides: tuple[str, ...]) -> None:
    check(freeze, world, overrides)


@pytest.mark.parametrize(("world", "overrides"), [(1, layout(1)), (4, layout(2))])
def test_tied_embedding(world: int, overrides: tuple[str, ...]) -> None:
    check("nothing", world, overrides, tied=True)


def test_recomputation_changes_nothing() -> None:
    check("nothing", 2, layout(2, "colocated", 2, "pipeline.activation_checkpoint_interval=1"))


def test_balance_off_changes_nothing() -> None:
    check("nothing", 2, layout(1, "colocated", 2, "omni.balance.mode=off"))


# Ranks with layout(): dp3, where the third is in no gang of its own, and pp2dp2. Images have 16 tokens, so
# that all are encoded in slices.
@pytest.mark.parametrize(("world", "stages"), [(3, 1), (4, 2)])
def test_slices_of_images_change_nothing(world: int, stages: int) -> None:
    results = check("nothing", world, layout(stages, "colocated", 2, "omni.encoder_parallel.long_short=8"))
    assert results[0]["slices"] > 0


# Placements differ only with more than one stage, ZeRO stages only where an encoder trains.
FULL = [
    (freeze, world, layout(stages, placement, zero))
    for freeze in FREEZE
    for world, stages in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
    for placement in ("colocated", "first_stage")[: 1 + (stages > 1)]
    for zero in ((2,) if freeze == "encoders" else (1, 2, 3))
]


@pytest.mark.full
@pytest.mark.parametrize(("freeze", "world", "overrides"), FULL)
def test_every_layout_equals_one_process(freeze: str, world: int, overrides: tuple[str, ...]) -> None:
    check(freeze, world, overrides)
