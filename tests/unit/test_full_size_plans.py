"""Published sizes, dense and with experts, planned for 8 to 512 GPUs: layers, parameters, memory, layout."""

import functools
from pathlib import Path

import pytest

from models.multimodal import read_model
from omni_ds.composition import Composition, complete, plan_of, read_composition
from omni_ds.config import Config, load_config, resolve
from omni_ds.errors import UserError
from omni_ds.layout import numerics_of, settle_degrees
from omni_ds.plan.activations import Load
from omni_ds.plan.build import Plan, build_step
from omni_ds.plan.example import example_samples
from omni_ds.plan.hardware import GIB, Device
from omni_ds.plan.held import held_by_stage
from omni_ds.plan.memory import rank_memory
from omni_ds.plan.memory_table import memory_table

CONFIGS = Path(__file__).parents[2] / "ds_configs"
MODELS = {
    "Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
    "Qwen3-VL-235B-A22B-Instruct": 235_670_022_896,
}
AUTO = (
    "pipeline.stages=auto",
    "tensor_parallel.autotp_size=auto",
    'expert_parallel={"enabled": true, "autoep_size": "auto"}',
    "zero_optimization.offload_optimizer=null",
    "train_batch_size=512",
)


@functools.cache
def read(name: str, gib: int = 80) -> tuple[Config, Composition]:
    overrides = [f"omni.model.path={CONFIGS / 'models' / name}", *AUTO]
    overrides += [f"omni.hardware.device_memory_gib={gib}"]
    config = complete(load_config(CONFIGS / "qwen3-vl-30b-a3b.json", overrides))
    return config, read_composition(config, processors=False)


def planned(name: str, world: int, gib: int) -> tuple[Plan, Config]:
    config, parts = read(name, gib)
    config, _ = settle_degrees(config, world, Device(), parts)
    config = resolve(config, world, None, has_cuda=True)
    return plan_of(config, parts, world), config


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_class(name: str) -> None:
    _, parts = read(name)
    counted = parts.llm.parameters
    counted += sum(meta.tower_parameters + meta.projector_parameters for meta in parts.encoders)
    model = read_model(read(name)[0].omni.model).model
    assert counted == sum(parameter.numel() for parameter in model.parameters()) == MODELS[name]


@pytest.mark.parametrize("world", [8, 64, 512])
@pytest.mark.parametrize("name", MODELS)
def test_a_layout_for_any_number_of_ranks(name: str, world: int) -> None:
    """With as much memory as it takes; what a rank needs of it is told."""
    plan, config = planned(name, world, 1000)
    assert plan.mesh.world_size == world
    assert plan.stages[0][0] == 0 and plan.stages[-1][1] == plan.llm.layers
    assert all(stop == start for (_, stop), (start, _) in zip(plan.stages, plan.stages[1:], strict=False))
    held = [held_by_stage(plan.llm, plan.mesh, plan.stages, s) for s in range(plan.mesh.pipe)]
    if plan.mesh.tensor == 1:
        assert plan.llm.parameters == sum(one.dense + one.experts * plan.mesh.expert for one in held)
    samples = example_samples(plan, config.train_batch_size, config.omni.data.max_length)
    step, numerics = build_step(plan, 0, samples), numerics_of(config, fused=True)
    assert max(len(step.actions(rank)) for rank in (0, world - 1)) > 0
    load = Load.of(step)
    peaks = [rank_memory(plan, s, load, numerics).peak for s in range(plan.mesh.pipe)]
    assert 0 < max(peaks) < 1000 * GIB
    table = memory_table(plan, load, numerics).splitlines()
    assert len(table) == 3 + plan.mesh.pipe


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("Qwen2.5-VL-7B-Instruct", {8: True}),
        ("Qwen3-VL-30B-A3B-Instruct", {8: False, 16: True}),
        ("Qwen3-VL-235B-A22B-Instruct", {64: False, 128: True}),
    ],
)
def test_how_many_gpus_of_80_gib_hold_a_model(name: str, fits: dict[int, bool]) -> None:
    for world, fit in fits.items():
        if fit:
            assert planned(name, world, 80)[0].mesh.world_size == world
        else:
            with pytest.raises(UserError, match=f"no layout of {world} ranks fits 72 GiB .* needs .* GiB"):
                planned(name, world, 80)
