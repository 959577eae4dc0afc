"""Rows of every form become the same sample, or are refused with a reason."""

import base64

import numpy as np
import pytest
from PIL import Image

from data.errors import MediaError, RowError
from data.media import media_ref
from data.rows import MEDIA_BASE, RowReader

FIRST, SECOND = chr(MEDIA_BASE), chr(MEDIA_BASE + 1)
ANSWER = {"role": "assistant", "content": "4"}
URL = "data:image/png;base64," + base64.b64encode(b"abc").decode()


def read(row, folder, modalities=("image", "audio"), **options):
    return RowReader(modalities, folder, **options).read(row)


def ask(content, **columns):
    return {"messages": [{"role": "user", "content": content}, ANSWER]} | columns


SAME = {
    "tags": ask("<image>which?", images=["a.png"]),
    "singular column": ask("<image>which?", image="a.png"),
    "parts": ask([{"type": "image", "image": "a.png"}, {"type": "text", "text": "which?"}]),
    "part from column": ask([{"type": "image"}, {"type": "text", "text": "which?"}], images=["a.png"]),
    "parts with nulls": ask(
        [{"type": "image", "path": "a.png", "text": None}, {"type": "text", "text": "which?", "image": None}]
    ),
    "image_url": ask([{"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}, "which?"]),
    "json text": {
        "messages": '[{"role": "user", "content": "<image>which?"}, {"role": "assistant", "content": "4"}]',
        "images": ["a.png"],
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": "<image>which?"}, {"from": "gpt", "value": "4"}],
        "images": ["a.png"],
    },
    "llava": {
        "id": "1",
        "image": "a.png",
        "conversations": [{"from": "human", "value": "<image>which?"}, {"from": "gpt", "value": "4"}],
    },
}


@pytest.mark.parametrize("form", SAME)
def test_forms(form, tmp_path):
    sample = read(SAME[form], tmp_path)
    assert [(m["role"], m["content"]) for m in sample.messages] == [
        ("user", FIRST + "which?"),
        ("assistant", "4"),
    ]
    assert [ref.path for ref in sample.media] == [str(tmp_path / "a.png")]


def test_media_are_numbered_in_the_order_of_the_text(tmp_path):
    content = [{"type": "audio", "audio": "own.wav"}, {"type": "audio"}, {"type": "image", "image": URL}]
    sample = read(ask(content, audios=["column.wav"]), tmp_path)
    assert sample.messages[0]["content"] == "".join(chr(MEDIA_BASE + n) for n in range(3))
    assert [ref.path and ref.path.rsplit("/")[-1] for ref in sample.media] == ["own.wav", "column.wav", None]
    assert sample.media[2].content == b"abc"


def test_columns_and_query(tmp_path):
    row = {"clip": {"bytes": b"x", "path": None}, "text": "hello", "id": 3}
    options = {"columns": {"clip": "audios", "text": "response"}, "query": "<audio>Transcribe."}
    sample = read(row, tmp_path, **options)
    assert [m["content"] for m in sample.messages] == [FIRST + "Transcribe.", "hello"]
    assert sample.media[0].content == b"x"
    with pytest.raises(RowError, match="mapped column missing"):
        read({"clip": b"x"}, tmp_path, **options)


def test_system_tools_task_and_calls(tmp_path):
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": None}}}
    row = {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
        "system": "Be brief.",
        "tools": '[{"type": "function"}]',
        "task": "sum",
    }
    sample = read(row, tmp_path)
    assert sample.messages[0] == {"role": "system", "content": "Be brief."}
    assert sample.messages[2]["tool_calls"] == [{"function": {"name": "f", "arguments": {"a": 1}}}]
    assert sample.tools == [{"type": "function"}] and sample.task == "sum"


def test_sharegpt_function_call(tmp_path):
    turns = [
        {"from": "human", "value": "x"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "three"},
    ]
    sample = read({"conversations": turns}, tmp_path)
    assert [m["role"] for m in sample.messages] == ["user", "assistant", "tool", "assistant"]
    assert sample.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}


def test_a_tag_without_its_column_is_text_unless_it_must_be_a_mistake(tmp_path):
    assert read(ask("<video> in HTML"), tmp_path).messages[0]["content"] == "<video> in HTML"
    assert read({"text": "an <image> tag"}, tmp_path).text == "an <image> tag"
    literal = ask([{"type": "text", "text": "an <image> tag"}])
    assert read(literal, tmp_path).messages[0]["content"] == "an <image> tag"
    assert read(ask("<image>"), tmp_path, modalities=()).messages[0]["content"] == "<image>"
    with pytest.raises(RowError, match="more <image> tags than images"):
        read(ask("<image>"), tmp_path)


def test_media_values(tmp_path):
    pixels = np.zeros((4, 6, 3), dtype=np.uint8)
    assert media_ref("image", pixels, tmp_path).array.shape == (4, 6, 3)
    assert media_ref("image", Image.fromarray(pixels), tmp_path).array.shape == (4, 6, 3)
    assert media_ref("image", {"bytes": None, "path": "a.png"}, tmp_path).path == str(tmp_path / "a.png")
    assert media_ref("image", "/a/b.png", tmp_path).path == "/a/b.png"
    assert media_ref("image", "file:///a/b.png", tmp_path).path == "/a/b.png"
    clip = {"array": [0.0, 0.5], "sampling_rate": 8000, "path": None}
    assert media_ref("audio", clip, tmp_path).sampling_rate == 8000
    spoken = {"data": base64.b64encode(b"x").decode(), "format": "wav"}
    assert media_ref("audio", spoken, tmp_path).content == b"x"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1], "row is not an object"),
        ({"a": 1}, "row has no messages"),
        ({"text": " "}, "empty text"),
        ({"messages": []}, "no messages"),
        ({"messages": "[{"}, "messages is not valid JSON"),
        ({"messages": ["x"]}, "message is not an object"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role"),
        ({"response": "x"}, "response without query"),
        (ask("<image><image>", images=["a.png"]), "more <image> tags than images"),
        (ask("<image>", images=["a.png", "b.png"]), "more images than <image> tags"),
        (ask("x", images=["a.png"]), "more images than <image> tags"),
        (ask("<video>", videos=["a.mp4"]), "no encoder for video"),
        (ask([{"type": "video", "video": "a.mp4"}]), "no encoder for video"),
        (ask([{"type": "smell"}]), "content part of unknown type"),
        (ask([7]), "content part is not an object"),
        (ask("<image>", images=["https://x.org/a.png"]), "image is a web address"),
        (ask("<image>", images=["data:image/png;base64,?"]), "image is not valid base64"),
        (ask("<image>", images=["data:image/png,abc"]), "image data URL is not base64"),
        (ask("<image>", images=[{"width": 3}]), "image of unknown form"),
        (ask("<audio>", audios=[{"array": [0.1]}]), "audio array without sampling_rate"),
        (ask("mark " + chr(0xF0001)), "private-use"),
    ],
)
def test_refused(row, reason, tmp_path):
    with pytest.raises(RowError, match=reason) as caught:
        read(row, tmp_path)
    assert not isinstance(caught.value, MediaError)


def test_a_modality_without_encoder_is_refused(tmp_path):
    with pytest.raises(RowError, match="no encoder for audio"):
        read(ask("<audio>", audios=["a.wav"]), tmp_path, modalities=("image",))
