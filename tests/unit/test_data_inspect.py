"""`--inspect`: what is printed, held to golden files (OMNI_UPDATE_GOLDEN=1 writes them anew)."""

import json
import os

import pytest

from data.index import open_dataset
from data.inspect import inspect_samples
from tests.unit.data_helpers import GOLDEN, composition, flac, png, settings, source

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
THOUGHT = "<think>\nTwo pictures, one clip.\n</think>\n\nseven"
ROWS = {
    "several": {
        "task": "several",
        "messages": [
            {"role": "user", "content": "<image> and <image>, then <audio>: what is the sum?"},
            {"role": "assistant", "content": THOUGHT},
            {"role": "user", "content": "And without <image>?"},
            {"role": "assistant", "content": THOUGHT},
        ],
        "images": ["a.png", "b.png", "a.png"],
        "audios": ["a.flac"],
    },
    "silent": {
        "messages": [
            {"role": "user", "content": "hello <|im_end|>"},
            {"role": "assistant", "content": "hello", "loss": False},
            {"role": "user", "content": "Which digit?"},
            {"role": "assistant", "content": "three"},
        ]
    },
    "tools": {
        "messages": [
            {"role": "user", "content": "What is 1 + 2?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "three"},
        ],
        "tools": [TOOL],
    },
    "text": {"text": "A digit <image> in a text.", "images": ["a.png"]},
}
CASES = {
    "chatml": ("several", "silent", "text"),
    "chatml_generation": ("several", "silent", "text"),
    "think": ("several", "silent", "tools"),
    "inst": ("several", "silent", "text"),
}


@pytest.fixture
def folder(tmp_path):
    png(tmp_path / "a.png", 40, 30)
    png(tmp_path / "b.png", 20, 20)
    flac(tmp_path / "a.flac", 8000)
    return tmp_path


def printed(folder, template, names, n=9):
    path = folder / f"{template}.jsonl"
    path.write_text("\n".join(json.dumps(ROWS[name]) for name in names))
    dataset = open_dataset([source(path)], settings(), *composition(template=template), builder=True)
    return inspect_samples(dataset, n).replace(str(folder), "DATA")


@pytest.mark.parametrize("template", CASES)
def test_golden(template, folder):
    text = printed(folder, template, CASES[template])
    golden = GOLDEN / f"{template}.txt"
    if os.environ.get("OMNI_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_generation_marks_in_a_template_change_nothing(folder):
    with_marks, without = (printed(folder, t, CASES[t]) for t in ("chatml_generation", "chatml"))
    assert with_marks.replace("chatml_generation", "chatml") == without


def test_samples_are_taken_from_every_set_in_turn(folder):
    for name in ("silent", "text"):
        (folder / f"{name}.jsonl").write_text("\n".join([json.dumps(ROWS[name])] * 3))
    sets = [source(folder / "silent.jsonl"), source(folder / "text.jsonl", max_samples=1)]
    dataset = open_dataset(sets, settings(), *composition(), builder=True)
    heads = [line for line in inspect_samples(dataset, 3).splitlines() if line.startswith("sample")]
    assert [head.rsplit("/", 1)[1] for head in heads] == [
        "silent.jsonl:1)",
        "text.jsonl:1)",
        "silent.jsonl:2)",
    ]


def test_characters_of_several_tokens_are_shown_whole(folder):
    messages = [{"role": "user", "content": "名 <image>é"}, {"role": "assistant", "content": "ответ 🙂"}]
    (folder / "wide.jsonl").write_text(json.dumps({"messages": messages, "images": ["a.png"]}))
    dataset = open_dataset([source(folder / "wide.jsonl")], settings(), *composition(), builder=True)
    text = inspect_samples(dataset, 1)
    assert "| 名 <image>*4 é<|im_end|>" in text and "| ⟦ответ 🙂<|im_end|>⟧" in text
