"""What a user reads who made a mistake: one line for each, with the key, what was given, what is accepted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from omni_ds.config import apply_overrides, describe_schema, load_config
from omni_ds.config.docs import render_docs
from omni_ds.config.foreign import TRANSLATIONS
from omni_ds.config.tree import SchemaTree
from omni_ds.errors import UserError

ROOT = Path(__file__).parents[2]
COMPOSED = ROOT / "ds_configs" / "composed.json"


def message_of(*overrides, path=COMPOSED):
    with pytest.raises(UserError) as error:
        load_config(path, overrides)
    return str(error.value)


# One wrong `--set` each, and the whole line that answers it.
BAD_KEYS = [
    ("omni.data.max_lenght=5", "omni.data.max_lenght: unknown key; did you mean omni.data.max_length?"),
    (
        "omni.encoders.vision.pth=x",
        "omni.encoders.vision.pth: unknown key; did you mean omni.encoders.vision.path?",
    ),
    (
        "omni.data.train[1].wieght=1",
        "omni.data.train[1].wieght: unknown key; did you mean omni.data.train[1].weight?",
    ),
    ("max_length=5", "max_length: unknown key; did you mean omni.data.max_length?"),
    ("trian_batch_size=5", "trian_batch_size: unknown key; did you mean train_batch_size?"),
    (
        "omni.checkpoint.zzz=5",
        "omni.checkpoint.zzz: unknown key; known here: every, keep_last",
    ),
    (
        "checkpoint.load_universal=true",
        "checkpoint: this DeepSpeed key is not used: checkpoints have their own format "
        "here; see omni.checkpoint",
    ),
    (
        "lora.rank=8",
        "lora: LoRA is not supported yet: weights are trained in full; use freeze and lr of each part",
    ),
    ("train_batch_size=0", "train_batch_size: got 0, expected a whole number >= 1"),
    ('train_batch_size="8"', 'train_batch_size: got "8", expected a whole number >= 1'),
    ("train_batch_size=2.5", "train_batch_size: got 2.5, expected a whole number >= 1"),
    (
        "train_batch_size=auto",
        'train_batch_size: got "auto", expected a whole number >= 1; auto cannot be worked out here',
    ),
    ("train_micro_batch_size_per_gpu=4", 'train_micro_batch_size_per_gpu: got 4, expected "auto"'),
    ("gradient_clipping=-1", 'gradient_clipping: got -1, expected "auto" or a number >= 0'),
    ("pipeline.stages=all", 'pipeline.stages: got "all", expected "auto" or a whole number >= 1'),
    (
        "bf16=true",
        "bf16: got true, expected an object with the keys enabled, immediate_grad_update, "
        "check_grad_overflow",
    ),
    ("omni.llm.freeze=yes", 'omni.llm.freeze: got "yes", expected true or false'),
    (
        "omni.encoders.vision.modality=imgae",
        'omni.encoders.vision.modality: got "imgae", expected "image" or "audio" or "video" or null; '
        'did you mean "image"?',
    ),
    (
        "scheduler.type=cosine",
        'scheduler.type: got "cosine", expected "WarmupLR" or "WarmupDecayLR" or "WarmupCosineLR" or '
        '"OneCycle" or "LRRangeTest"; did you mean "WarmupCosineLR"?',
    ),
    ("omni.data.train=[]", "omni.data.train: is empty; expected at least one entry"),
    ("omni.data.train[0].weight=0", "omni.data.train[0].weight: got 0, expected a number > 0"),
    ("omni.data.max_skip_fraction=2", "omni.data.max_skip_fraction: got 2, expected a number >= 0 and <= 1"),
    ("omni.encoder_parallel.zero_stage=0", "omni.encoder_parallel.zero_stage: got 0, expected 1 or 2 or 3"),
    (
        "omni.export.max_shard_size=5XB",
        'omni.export.max_shard_size: got "5XB", expected a string such as "5GB"',
    ),
    (
        "omni.output_dir=7",
        "omni.output_dir: got 7, expected a string; put text in quotes (on a command line: 'key=\"text\"')",
    ),
    ('omni.eval.sets={"val":{}}', "omni.eval.sets.val.path: missing; expected a string"),
]


@pytest.mark.parametrize(("override", "line"), BAD_KEYS, ids=[override for override, _ in BAD_KEYS])
def test_bad_key_or_value(override, line):
    assert message_of(override) == f"{COMPOSED}: {line}"


def test_missing_keys_are_named(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    assert message_of(path=path).splitlines() == [
        f"{path}: 2 problems",
        "  train_batch_size: missing; expected a whole number >= 1",
        "  omni: missing; expected an object with the keys model, llm, encoders, encoder_parallel, balance, "
        "hardware, data, train, eval, checkpoint, export, output_dir, trace",
    ]


@pytest.mark.parametrize("name", TRANSLATIONS)
@pytest.mark.parametrize("place", ["", "omni.", "omni.encoders.vision."])
def test_names_of_other_trainers_are_translated(name, place):
    line = message_of(f"{place}{name.upper()}=1")
    assert (
        line
        == f"{COMPOSED}: {place}{name.upper()}: is another trainer's name; here it is {TRANSLATIONS[name]}"
    )


def test_translations_name_keys_that_exist():
    known = {path for path, _ in SchemaTree(describe_schema()).paths()}
    known |= {"optimizer.params.lr", "optimizer.params.weight_decay", "scheduler.params.warmup_num_steps"}
    for target in TRANSLATIONS.values():
        key = target.split()[0].rstrip(",")
        assert key.replace(".vision.", ".<name>.") in known, key


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes in line 1, column 2"),
        ('{"a": 1,\n "a": 2}', "the key a appears twice in one object; remove one"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ("[1]", "holds a list; expected an object {...} at the top level"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_files_that_are_not_a_json_object(tmp_path, text, part):
    path = tmp_path / "x.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    message = message_of(path=path)
    assert message.startswith(f"{path}: ") and part in message and len(message.splitlines()) == 1


def test_missing_file_and_folder(tmp_path):
    assert message_of(path=tmp_path / "x.json").endswith(
        "x.json: no such file; give the path of a JSON configuration"
    )
    assert "cannot be read" in message_of(path=tmp_path)


def test_several_problems_are_told_at_once():
    lines = message_of("omni.data.max_lenght=5", "train_batch_size=0", "pipeline.stages=0").splitlines()
    assert lines[0] == f"{COMPOSED}: 3 problems"
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "train_batch_size",
        "pipeline.stages",
        "omni.data.max_lenght",
    ]


def test_overrides_take_json_or_bare_strings_and_make_objects():
    raw = {"omni": {"data": {"train": [{"path": "a"}, {"path": "b"}]}}, "bf16": None}
    result = apply_overrides(
        raw,
        [
            "omni.output_dir=runs/a=b",
            'omni.llm.path="7"',
            "omni.data.train[1].weight=0.5",
            "omni.data.train.0.path=c",
            "bf16.enabled=true",
            "x=null",
            "omni.y=[1, 2]",
        ],
    )
    assert result == {
        "omni": {
            "data": {"train": [{"path": "c"}, {"path": "b", "weight": 0.5}]},
            "output_dir": "runs/a=b",
            "llm": {"path": "7"},
            "y": [1, 2],
        },
        "bf16": {"enabled": True},
        "x": None,
    }
    assert raw["bf16"] is None and raw["omni"]["data"]["train"][0] == {"path": "a"}


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("omni.train.max_steps", "expected dotted.key=value"),
        ("=5", "expected dotted.key=value"),
        ("omni.data.train[7].weight=1", "omni.data.train is a list of 3; use omni.data.train[0]"),
        ("omni.data.train.weight=1", "omni.data.train is a list of 3; use omni.data.train[0]"),
        ("train_batch_size.x=1", "train_batch_size is 256, which has no x; set train_batch_size whole"),
    ],
)
def test_overrides_that_fit_nowhere(override, part):
    message = message_of(override)
    assert message.startswith(f"--set {override}: ") and part in message


def test_schema_and_documentation_are_current():
    """After a change: `make docs`."""
    schema = describe_schema()
    assert json.loads((ROOT / "ds_configs" / "schema.json").read_text()) == schema
    assert (ROOT / "docs" / "config.md").read_text() == render_docs(schema)


def test_every_key_is_described():
    schema = describe_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    paths = dict(SchemaTree(schema).paths())
    assert len(paths) > 100
    for path, node in paths.items():
        assert node.get("description"), path


def test_editors_may_name_the_schema(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"$schema": "schema.json", **json.loads(COMPOSED.read_text())}))
    assert load_config(path) == load_config(COMPOSED)


def test_configuration_loads_without_torch():
    code = (
        "import sys, omni_ds.config; print(sorted({'torch', 'transformers', 'deepspeed'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
