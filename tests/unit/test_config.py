"""The configuration: the documented examples, every rule, resolving, and what the engines see."""

import copy
import json
from pathlib import Path

import pytest

from omni_ds.config import (
    encoder_engine_config,
    epoch_steps,
    llm_engine_config,
    load_config,
    monitor_config,
    optimizer_spec,
    parse_config,
    resolve,
    scheduler_params,
    total_steps,
    validate,
)
from omni_ds.errors import UserError

ROOT = Path(__file__).parents[2]
COMPOSED = ROOT / "ds_configs" / "composed.json"


def minimal(**changes):
    """The smallest configuration that trains, with dotted keys changed (`__` for a dot)."""
    raw = {
        "train_batch_size": 8,
        "optimizer": {"params": {"lr": 1e-3}},
        "omni": {
            "llm": {"path": "some/llm"},
            "encoders": {
                "vision": {"path": "some/vit", "modality": "image"},
                "audio": {"path": "some/whisper", "modality": "audio"},
            },
            "data": {"train": "data/train.jsonl"},
            "train": {"max_steps": 10},
            "output_dir": "runs/x",
        },
    }
    for dotted, value in changes.items():
        *path, last = dotted.split("__")
        target = raw
        for key in path:
            target = target.setdefault(key, {})
        target[last] = value
    return raw


def test_composed_example_loads_with_its_values():
    config = load_config(COMPOSED)
    assert config.train_batch_size == 256
    assert config.pipeline.stages == 4
    assert config.omni.encoders["vision"].projector.factor == 3
    assert config.omni.encoders["audio"].processor.max_seconds == 600
    assert [source.weight for source in config.omni.data.train] == [0.6, 0.3, 0.1]
    assert config.omni.data.train[1].columns == {"audio": "audios", "text": "response"}
    assert config.omni.export.max_shard_bytes == 5 * 10**9


def test_word_error_rate_is_understood_and_refused():
    parse_config(COMPOSED, ["omni.eval.sets.asr.metric=wer"])
    with pytest.raises(UserError, match="omni.eval.sets.asr.metric: wer is not supported yet"):
        load_config(COMPOSED, ["omni.eval.sets.asr.metric=wer"])


def test_finetune_example_parses_and_is_refused_as_a_later_feature():
    path = ROOT / "ds_configs" / "finetune.json"
    assert parse_config(path).omni.model.path == "Qwen/Qwen2.5-VL-3B-Instruct"
    with pytest.raises(UserError, match="finetune.json: omni.model is not supported yet: .*; use omni.llm"):
        load_config(path)


def test_bundled_configurations_load():
    for path in sorted((ROOT / "ds_configs").glob("*.json")):
        if path.name != "schema.json":
            parse_config(path)


def test_data_train_may_be_a_path_an_object_or_a_list():
    one = validate(minimal()).omni.data.train
    assert validate(minimal(omni__data__train={"path": "data/train.jsonl"})).omni.data.train == one
    assert validate(minimal(omni__data__train=["data/train.jsonl"])).omni.data.train == one
    assert one[0].path == "data/train.jsonl" and one[0].split == "train" and one[0].weight == 1.0


def test_a_configuration_written_out_loads_again():
    config = validate(
        minimal(
            scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
            omni__llm={"config": {"model_type": "qwen3", "pad_token_id": None}, "tokenizer": "t"},
        )
    )
    written = json.loads(json.dumps(config.to_dict()))
    assert validate(written) == config
    assert written["omni"]["llm"]["config"] == {"model_type": "qwen3", "pad_token_id": None}


def test_configuration_is_read_only():
    config = validate(minimal())
    with pytest.raises(ValueError, match="frozen"):
        config.train_batch_size = 3


# Each entry: changes to the smallest configuration, how the one message begins, and what it contains.
RULES = [
    ({"omni__llm": {}}, "omni.llm: give path", "config"),
    ({"omni__llm__config": {"model_type": "x"}}, "omni.llm: path and config exclude each other", "remove"),
    ({"omni__llm": {"config": {}, "tokenizer": "t"}}, "omni.llm.config.model_type: missing", "qwen3"),
    ({"omni__llm": {"config": {"model_type": "x"}}}, "omni.llm.tokenizer: missing", "give"),
    ({"omni__encoders__vision": {"path": "x"}}, "omni.encoders.vision.modality: missing", "image or audio"),
    (
        {"omni__encoders__llm": {"path": "x", "modality": "video"}},
        "omni.encoders.llm: an encoder's",
        "rename",
    ),
    (
        {"omni__encoders__vision__projector": {"reduction": "frame_stack", "factor": 2}},
        "omni.encoders.vision.projector.reduction: frame_stack is for audio",
        "pixel_shuffle",
    ),
    (
        {"omni__encoders__audio__projector": {"reduction": "pixel_shuffle", "factor": 2}},
        "omni.encoders.audio.projector.reduction: pixel_shuffle is for image",
        "frame_stack",
    ),
    ({"omni__encoders__audio__projector__factor": 2}, "omni.encoders.audio.projector.factor: 2", "no effect"),
    ({"omni__encoders__vision__processor__max_seconds": 2.0}, "omni.encoders.vision.processor.max", "audio"),
    ({"omni__encoders__audio__processor__max_pixels": 9}, "omni.encoders.audio.processor.max_p", "image"),
    (
        {"omni__encoders__vision__processor": {"min_pixels": 9, "max_pixels": 4}},
        "omni.encoders.vision.processor.min_pixels: 9 is more than max_pixels 4",
        "exchange",
    ),
    (
        {"omni__encoders__audio__feature_layer": -2},
        "omni.encoders.audio.feature_layer: is for image",
        "remove",
    ),
    ({"omni__encoders__audio__placeholder": "<image>"}, "omni.encoders.audio.placeholder: <image>", "vision"),
    ({"omni__train": {}}, "omni.train: give max_steps or num_train_epochs", ""),
    (
        {"omni__train__num_train_epochs": 1},
        "omni.train: max_steps and num_train_epochs exclude",
        "remove one",
    ),
    ({"omni__data__max_length": 9000}, "omni.data.max_tokens_per_micro_batch: 8192 is less", "at least 9000"),
    (
        {"omni__eval__sets": {"a": {"path": "x", "weight": 0.5}}},
        "omni.eval.sets.a.weight: each sample of an evaluation set is used once",
        "remove",
    ),
    ({"omni__eval__sets": {"a/b": {"path": "x"}}}, "omni.eval.sets.a/b: the name", "leave out"),
    ({"fp16__enabled": True}, "fp16.enabled: float16 is refused", '"bf16": {"enabled": true}'),
    ({"data_types__grad_accum_dtype": "bf16"}, "data_types.grad_accum_dtype: bf16 needs", "enable bf16"),
    ({"zero_optimization__stage": 0}, "zero_optimization.stage: 0 clips by a wrong", "use 1"),
    (
        {"zero_optimization__stage": 2, "pipeline__stages": 2},
        "zero_optimization.stage: 2 shards gradients",
        "set zero_optimization.stage to 1, or pipeline.stages to 1",
    ),
    ({"optimizer__type": "AdmW"}, "optimizer.type: AdmW is not known", "did you mean AdamW?"),
    ({"optimizer__params__learning_rate": 1}, "optimizer.params.learning_rate: AdamW has no", "lr"),
    ({"optimizer__params__max_grad_norm": 1}, "optimizer.params.max_grad_norm: use", "gradient_clipping"),
    ({"optimizer__params__lr": -1}, "optimizer.params.lr: got -1", "a number >= 0"),
    ({"optimizer__params__betas": [0.9, 1.0]}, "optimizer.params.betas: got [0.9, 1.0]", "below 1"),
    ({"optimizer__params__amsgrad": "auto"}, "optimizer.params.amsgrad: auto is not possible", "remove"),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}},
        "scheduler.params.warmup_steps: WarmupLR has no such argument",
        "warmup_num_steps",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
        "scheduler.params.warmup_num_steps: got 0",
        "whole number >= 1 or auto",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1e-3, 1e-4]}}},
        "scheduler.params.warmup_max_lr: got a list",
        "scaled with their own lr",
    ),
    (
        {"scheduler": {"type": "OneCycle", "params": {"cycle_momentum": "auto"}}},
        "scheduler.params.cycle_momentum: auto is not possible",
        "give a value",
    ),
]


@pytest.mark.parametrize(("changes", "start", "contains"), RULES, ids=[start for _, start, _ in RULES])
def test_rule(changes, start, contains):
    with pytest.raises(UserError) as error:
        validate(minimal(**changes))
    lines = str(error.value).splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith(start)
    assert contains in lines[0]


def test_everything_frozen_leaves_nothing_to_learn():
    raw = minimal(omni__llm__freeze=True)
    for encoder in raw["omni"]["encoders"].values():
        encoder |= {"freeze": True, "projector": {"freeze": True}}
    with pytest.raises(UserError, match="every part is frozen"):
        validate(raw)
    raw["omni"]["encoders"]["audio"]["projector"]["freeze"] = False
    validate(raw)


def test_parts_in_a_whole_checkpoint_have_no_weights_of_their_own():
    raw = minimal(
        omni__model={"path": "m"}, omni__llm={"freeze": True}, omni__encoders={"vision": {"path": "x"}}
    )
    with pytest.raises(UserError, match="omni.encoders.vision.path: omni.model.path already says where"):
        validate(raw)


# Each entry: changes, and the key of the message "... is not supported yet: reason; use ...".
LATER = [
    ({"tensor_parallel__autotp_size": 2}, "tensor_parallel.autotp_size"),
    ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
    ({"expert_parallel__enabled": True}, "expert_parallel"),
    ({"zero_optimization__stage": 3}, "zero_optimization.stage"),
    ({"zero_optimization__offload_optimizer": {"device": "cpu"}}, "zero_optimization.offload_optimizer"),
    ({"activation_checkpointing__cpu_checkpointing": True}, "activation_checkpointing.cpu_checkpointing"),
    ({"pipeline__activation_checkpoint_interval": 2}, "pipeline.activation_checkpoint_interval"),
    ({"omni__encoders__vision__processor__max_pixels": 9}, "omni.encoders.vision.processor.max_pixels"),
    ({"omni__encoder_parallel__long_short": 4096}, "omni.encoder_parallel.long_short"),
    ({"omni__balance__group_size": 2}, "omni.balance.group_size"),
    ({"omni__encoders__film": {"path": "x", "modality": "video"}}, "omni.encoders.film.modality"),
    ({"omni__encoders__audio__modality": "image"}, "omni.encoders.audio.modality"),
]


@pytest.mark.parametrize(("changes", "key"), LATER, ids=[key for _, key in LATER])
def test_later_feature_is_refused_with_a_way_out(tmp_path, changes, key):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(minimal(**changes)))
    parse_config(path)
    with pytest.raises(UserError) as error:
        load_config(path)
    message = str(error.value)
    assert message.startswith(f"{path}: {key}")
    assert "is not supported yet: " in message and "; use " in message
    assert len(message.splitlines()) == 1


def test_degrees_without_effect_are_accepted(tmp_path):
    path = tmp_path / "x.json"
    changes = {
        "tensor_parallel__autotp_size": 0,
        "sequence_parallel_size": 1,
        "expert_parallel__enabled": False,
        "omni__encoder_parallel__long_short": "off",
        "zero_optimization__offload_optimizer": {"device": "none"},
        "fp16__enabled": "auto",
    }
    path.write_text(json.dumps(minimal(**changes)))
    assert resolve(load_config(path), 1, None).fp16.enabled is False


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
        assert engine["bf16"] == {"enabled": True} and engine["data_types"] == {"grad_accum_dtype": "fp32"}
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


def test_optimizer_defaults_are_written_out():
    assert optimizer_spec(validate(minimal(optimizer={}))) == {
        "type": "AdamW",
        "params": {"lr": 1e-5, "weight_decay": 0.0},
        "by_deepspeed": False,
    }
    auto = {"type": "adamw", "params": {key: "auto" for key in ("lr", "betas", "eps", "weight_decay")}}
    assert optimizer_spec(validate(minimal(optimizer=auto)))["params"] == {
        "lr": 1e-5,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }


@pytest.mark.parametrize(
    ("given", "built", "by_deepspeed"),
    [
        ({"type": "Adam"}, "AdamW", False),
        ({"type": "Adam", "params": {"adam_w_mode": False, "torch_adam": True}}, "Adam", False),
        ({"type": "SGD", "params": {"momentum": 0.9}}, "SGD", False),
        ({"type": "FusedAdam"}, "FusedAdam", True),
        ({"type": "DeepSpeedCPUAdam"}, "CPUAdam", True),
    ],
)
def test_optimizer_types(given, built, by_deepspeed):
    spec = optimizer_spec(validate(minimal(optimizer=given)))
    assert (spec["type"], spec["by_deepspeed"]) == (built, by_deepspeed)
    assert not spec["params"].keys() & {"torch_adam"}
    assert by_deepspeed or "adam_w_mode" not in spec["params"]


GROUPS = (1e-3, 1e-5, 0.0)


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ({"type": "WarmupLR"}, {"warmup_min_lr": (0, 0, 0), "warmup_max_lr": GROUPS}),
        (
            {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 2e-3}},
            {"warmup_min_lr": (1e-4, 1e-6, 0), "warmup_max_lr": (2e-3, 2e-5, 0)},
        ),
        (
            {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_max_lr": "auto"}},
            {"warmup_min_lr": (0, 0, 0), "warmup_max_lr": GROUPS},
        ),
        ({"type": "OneCycle"}, {"cycle_min_lr": (1e-4, 1e-6, 0), "cycle_max_lr": GROUPS}),
        ({"type": "LRRangeTest"}, {"lr_range_test_min_lr": GROUPS}),
        ({"type": "WarmupCosineLR", "params": {"total_num_steps": 10}}, {}),
    ],
)
def test_schedule_has_one_rate_a_group(scheduler, expected):
    params = scheduler_params(validate(minimal(scheduler=scheduler)), GROUPS)
    rates = {key: value for key, value in params.items() if isinstance(value, list)}
    assert rates.keys() == expected.keys()
    for key, values in expected.items():
        assert rates[key] == pytest.approx(values)
    given = scheduler.get("params", {})
    assert params.items() >= {key: given[key] for key in given.keys() - rates.keys()}.items()


def test_no_schedule_has_no_arguments():
    assert scheduler_params(validate(minimal()), GROUPS) == {}


@pytest.mark.slow
def test_schedules_are_deepspeed_s():
    """DeepSpeed's classes take what is made for them, and every group keeps its own rate."""
    import torch
    from deepspeed.runtime import lr_schedules

    for kind in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"):
        config = resolve(validate(minimal(scheduler={"type": kind})), 1, None)
        weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        groups = [{"params": [weight], "lr": lr} for weight, lr in zip(weights, GROUPS, strict=False)]
        optimizer = torch.optim.AdamW(groups)
        schedule = getattr(lr_schedules, kind)(optimizer, **scheduler_params(config, GROUPS[:2]))
        for _ in range(5):
            schedule.step()
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert first > 0 and first / second == pytest.approx(GROUPS[0] / GROUPS[1]), kind


def test_defaults_do_not_depend_on_earlier_configurations():
    raw = minimal()
    before = copy.deepcopy(raw)
    validate(raw).omni.data.chat_template_kwargs["x"] = 1
    assert raw == before and validate(raw).omni.data.chat_template_kwargs == {}
