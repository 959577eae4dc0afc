"""Resolving "auto", degrees against the world, and what the two engines see."""

import pytest

from omni_ds.composition import Composition
from omni_ds.config import (
    encoder_engine_config,
    epoch_steps,
    llm_engine_config,
    monitor_config,
    resolve,
    total_steps,
    validate,
)
from omni_ds.config.resolve import DEGREES, asked_degrees, with_degrees
from omni_ds.errors import UserError
from omni_ds.layout import settle_degrees
from omni_ds.plan.hardware import Device
from tests.unit.config_helpers import minimal
from tests.unit.plan_cases import llm


def test_resolve_replaces_every_auto():
    raw = minimal(
        train_micro_batch_size_per_gpu="auto",
        gradient_accumulation_steps="auto",
        gradient_clipping="auto",
        bf16={"enabled": "auto"},
        pipeline={"stages": "auto"},
        activation_checkpointing={},
        scheduler={
            "type": "WarmupCosineLR",
            "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"},
        },
        omni__train={"num_train_epochs": 2},
    )
    raw["tensorboard"] = {"enabled": True}
    config = validate(raw)
    resolved = resolve(config, 2, 401, has_cuda=True)
    assert resolved.gradient_accumulation_steps is None
    assert resolved.gradient_clipping == 1.0
    assert resolved.bf16.enabled is True and resolved.data_types.grad_accum_dtype == "fp32"
    assert resolved.pipeline.stages == 1 and resolved.pipeline.activation_checkpoint_interval == 1
    assert resolved.omni.train.max_steps == 101 and resolved.omni.train.num_train_epochs is None
    assert resolved.scheduler.params == {"warmup_num_steps": 4, "total_num_steps": 101}
    assert resolved.tensorboard.output_path == "runs/x/tensorboard"
    assert resolve(config, 2, 401).bf16.enabled is False
    assert resolve(resolved, 2, 401) == resolved
    assert config.pipeline.stages == "auto", "the given configuration is left as it was"


def test_resolve_without_data_leaves_epochs_open():
    config = validate(minimal(omni__train={"num_train_epochs": 2}))
    assert resolve(config, 1, None).omni.train.num_train_epochs == 2
    assert total_steps(config, None) is None
    assert total_steps(config, 12) == 3


def test_schedule_needs_no_length_given():
    config = validate(minimal(scheduler={"type": "WarmupDecayLR", "params": {"warmup_num_steps": 100}}))
    assert resolve(config, 1, None).scheduler.params == {"warmup_num_steps": 100, "total_num_steps": 10}


@pytest.mark.parametrize(
    ("epochs", "rows", "batch", "steps"),
    [(1, 8, 8, 1), (1, 9, 8, 2), (0.5, 8, 8, 1), (0.1, 800, 8, 10), (3, 100, 8, 38), (1, 1, 100, 1)],
)
def test_steps_of_epochs(epochs, rows, batch, steps):
    assert epoch_steps(epochs, rows, batch) == steps


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
def test_stages_divide_the_world(world):
    for stages in range(1, 9):
        config = validate(minimal(pipeline__stages=stages))
        if world % stages == 0:
            assert resolve(config, world, None).pipeline.stages == stages
        else:
            with pytest.raises(UserError, match=f"does not divide {world} processes"):
                resolve(config, world, None)


def test_stages_that_do_not_divide_name_the_nearest_that_do():
    with pytest.raises(
        UserError, match=r"= 3 does not divide 8 processes; .* pipeline.stages: 2 or 4; or start"
    ):
        resolve(validate(minimal(pipeline__stages=3)), 8, None)


def test_missing_monitor_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="wandb.enabled: the package wandb is not installed"):
        resolve(validate(minimal(wandb={"enabled": True})), 1, None)


def test_encoders_add_gradients_at_once_whatever_the_llm_does():
    config = resolve(validate(minimal(bf16={"enabled": True, "immediate_grad_update": False})), 1, None)
    assert llm_engine_config(config, micro_batches=1, data_degree=1)["bf16"]["immediate_grad_update"] is False
    assert encoder_engine_config(config)["bf16"]["immediate_grad_update"] is True


def test_engines_see_the_plan_s_arithmetic_and_nothing_of_ours():
    raw = minimal(
        bf16={"enabled": True},
        pipeline={"stages": 2},
        scheduler={"type": "WarmupLR"},
        communication_data_type="fp32",
        zero_optimization={"stage": 1, "reduce_bucket_size": 5e8},
        omni__encoder_parallel={"zero_stage": 3},
    )
    raw["csv_monitor"] = {"enabled": True}
    config = resolve(validate(raw), 4, None)
    llm, encoder = llm_engine_config(config, micro_batches=3, data_degree=2), encoder_engine_config(config)
    assert llm["train_batch_size"] == 6
    assert (llm["train_micro_batch_size_per_gpu"], llm["gradient_accumulation_steps"]) == (1, 3)
    assert (encoder["train_micro_batch_size_per_gpu"], encoder["gradient_accumulation_steps"]) == (1, 1)
    assert llm["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 500_000_000}
    assert encoder["zero_optimization"]["stage"] == 3
    for engine in (llm, encoder):
        assert engine["gradient_clipping"] == 0.0
        assert engine["bf16"] == {"enabled": True, "immediate_grad_update": True}
        assert engine["data_types"] == {"grad_accum_dtype": "fp32"}
        assert engine["communication_data_type"] == "fp32"
        assert not engine.keys() & {
            "omni",
            "optimizer",
            "scheduler",
            "tensor_parallel",
            "csv_monitor",
            "fp16",
        }
    assert monitor_config(config)["csv_monitor"]["output_path"] == "runs/x/csv_monitor"


def test_float32_engines_have_no_precision_sections():
    config = resolve(validate(minimal()), 1, None)
    assert not llm_engine_config(config, 1, 1).keys() & {"bf16", "data_types"}


def test_frozen_llm_has_no_optimizer_to_shard():
    config = resolve(validate(minimal(omni__llm__freeze=True)), 1, None)
    assert llm_engine_config(config, 1, 1)["zero_optimization"]["stage"] == 0


def test_only_the_llm_is_offloaded():
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    zero["offload_param"] = {"device": "cpu"}
    config = resolve(validate(minimal(zero_optimization=zero)), 1, None)
    llm = llm_engine_config(config, 1, 1)
    assert llm["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": False},
    }
    assert llm["zero_force_ds_cpu_optimizer"] is False
    assert encoder_engine_config(config)["zero_optimization"] == {"stage": 2}


def _auto(**more):
    return validate(
        minimal(
            pipeline__stages="auto",
            tensor_parallel={"autotp_size": "auto"},
            sequence_parallel_size="auto",
            expert_parallel={"autoep_size": "auto"},
            **more,
        )
    )


def test_degrees_that_are_auto_take_the_numbers_found():
    config = _auto()
    assert set(asked_degrees(config).values()) == {None}
    found = with_degrees(config, dict(zip(DEGREES, (2, 4, 1, 1), strict=True)))
    assert tuple(asked_degrees(found).values()) == (2, 4, 1, 1)
    assert tuple(asked_degrees(resolve(config, 8, None)).values()) == (1, 1, 1, 1)
    assert with_degrees(found, dict.fromkeys(DEGREES, 8)) == found


def test_degrees_are_one_where_no_memory_is_known_and_chosen_where_it_is():
    model = llm(layers=8)
    composition = Composition(None, 0, {}, model, ())
    config = _auto()
    assert settle_degrees(config, 4, Device(), composition) == (config, None)
    device = Device("NVIDIA H200", 141 << 30, 4)
    settled, choice = settle_degrees(config, 4, device, composition)
    assert tuple(asked_degrees(settled).values()) == (1, 1, 1, 1) and choice.mesh.data == 4
    given = validate(minimal(pipeline__stages=2))
    assert settle_degrees(given, 4, device, composition) == (given, None)
    with pytest.raises(UserError, match="no layout of 4 ranks fits"):
        settle_degrees(_auto(omni__hardware={"device_memory_gib": 0.001}), 4, Device(), composition)


def test_sums_in_bf16_need_a_gpu_where_bf16_is_auto():
    config = validate(minimal(bf16={"enabled": "auto"}, data_types={"grad_accum_dtype": "bf16"}))
    for has_cuda, expected in ((True, "bf16"), (False, "fp32")):
        resolved = resolve(config, 1, None, has_cuda=has_cuda)
        assert resolved.bf16.enabled is has_cuda and resolved.data_types.grad_accum_dtype == expected
