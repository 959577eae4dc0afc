"""What must hold between keys, and what is refused as a later feature."""

import json

import pytest

from omni_ds.config import load_config, parse_config, validate
from omni_ds.errors import UserError
from tests.unit.config_helpers import minimal

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
    ({"zero_optimization__stage": 0, "bf16__enabled": True}, "zero_optimization.stage: 0 has no", "use 1"),
    (
        {"zero_optimization__stage": 0, "bf16__enabled": "auto"},
        "zero_optimization.stage: 0 has no",
        "to false",
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
        "zero_optimization.offload_optimizer.device: nvme is not supported",
        '"cpu"',
    ),
    (
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.offload_optimizer: stage 0 updates",
        "use stage 1, 2 or 3",
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        "zero_optimization.offload_param: stage 2 keeps the weights whole",
        "use stage 3",
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        "zero_optimization.offload_param: needs offload_optimizer",
        '{"device": "cpu"}',
    ),
    (
        {"omni__llm__freeze": True, "zero_optimization__offload_optimizer": {"device": "cpu"}},
        "zero_optimization: a frozen LLM has no optimizer state",
        "remove",
    ),
    (
        {"optimizer__type": "FusedAdam", "zero_optimization__offload_optimizer": {"device": "cpu"}},
        "optimizer.type: FusedAdam updates on the GPU",
        "use AdamW or CPUAdam",
    ),
    (
        {"optimizer__type": "FusedLamb", "zero_optimization__offload_optimizer": {"device": "cpu"}},
        "optimizer.type: FusedLamb updates on the GPU",
        "use AdamW or CPUAdam",
    ),
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
    ({"activation_checkpointing__cpu_checkpointing": True}, "activation_checkpointing.cpu_checkpointing"),
    ({"activation_checkpointing__number_checkpoints": 2}, "activation_checkpointing.number_checkpoints"),
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


def test_first_stage_cut_needs_first_stage() -> None:
    cut = {"first_stage_cut": "with_encoders"}
    with pytest.raises(UserError, match='first_stage_cut: "with_encoders" needs placement "first_stage"'):
        validate(minimal(omni__encoder_parallel=cut))
    parsed = validate(minimal(omni__encoder_parallel={**cut, "placement": "first_stage"}))
    assert parsed.omni.encoder_parallel.first_stage_cut == "with_encoders"
