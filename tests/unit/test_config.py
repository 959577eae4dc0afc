"""Loading: the documented examples, what may be left out, what a written configuration gives back."""

import copy
import json
from pathlib import Path

import pytest

from omni_ds.config import load_config, parse_config, resolve, validate
from omni_ds.errors import UserError
from tests.unit.config_helpers import minimal

ROOT = Path(__file__).parents[2]
COMPOSED = ROOT / "ds_configs" / "composed.json"


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


def test_finetune_example_loads():
    config = load_config(ROOT / "ds_configs" / "finetune.json")
    assert config.omni.model.path == "Qwen/Qwen2.5-VL-3B-Instruct"


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


def test_defaults_do_not_depend_on_earlier_configurations():
    raw = minimal()
    before = copy.deepcopy(raw)
    validate(raw).omni.data.chat_template_kwargs["x"] = 1
    assert raw == before and validate(raw).omni.data.chat_template_kwargs == {}
