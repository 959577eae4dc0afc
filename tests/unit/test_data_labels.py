"""The label mask: which tokens are targets, under templates of every kind."""

import numpy as np
import pytest

from data.errors import RowError
from data.placeholders import add_placeholders
from data.rows import RowReader
from data.text import TextProcessor
from data.tokenised import Tokenised
from omni_ds.errors import UserError
from tests.unit.data_helpers import GOLDEN, encoder, make_text, make_tokenizer, shown

READER = RowReader(("image", "audio"), GOLDEN)
TEMPLATES = ("chatml", "chatml_generation", "think", "inst")
THOUGHTS = [
    {"role": "user", "content": "<image>Which digit?"},
    {"role": "assistant", "content": "<think>\nlooks round\n</think>\n\nzero"},
    {"role": "user", "content": "and <audio>?"},
    {"role": "assistant", "content": "<think>\nsounds like three\n</think>\n\nthree"},
]
PLAIN = [
    {"role": "user", "content": "Which digit?"},
    {"role": "assistant", "content": "seven"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "three"},
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "x\ny"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLS = [
    {"role": "user", "content": "What is 1 + x?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]


def mark(template, row, **options):
    text = make_text(template, **options)
    return shown(text, text.tokenise(READER.read(row)))


@pytest.mark.parametrize("template", ["chatml", "chatml_generation"])
def test_thoughts_in_content_are_targets_where_the_template_keeps_them(template):
    media = {"images": ["a.png"], "audios": ["a.flac"]}
    assert mark(template, {"messages": THOUGHTS} | media) == (
        "<|im_start|>user\n<image>Which digit?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nlooks round\n</think>\n\nzero<|im_end|>⟧\n"
        "<|im_start|>user\nand <audio>?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nsounds like three\n</think>\n\nthree<|im_end|>⟧\n"
    )


def test_thoughts_that_the_template_drops_are_not_missed():
    media = {"images": ["a.png"], "audios": ["a.flac"]}
    assert mark("think", {"messages": THOUGHTS} | media) == (
        "<|im_start|>user\n<image>Which digit?<|im_end|>\n"
        "<|im_start|>assistant\n⟦zero<|im_end|>⟧\n"
        "<|im_start|>user\nand <audio>?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nsounds like three\n</think>\n\nthree<|im_end|>⟧\n"
    )


def test_reasoning_content_is_a_thought_too():
    messages = [PLAIN[0], {"role": "assistant", "content": "seven", "reasoning_content": "a bar"}]
    assert mark("think", {"messages": messages}).endswith("⟦<think>\na bar\n</think>\n\nseven<|im_end|>⟧\n")


@pytest.mark.parametrize("thinking", [None, False])
def test_an_empty_thought_of_the_template_is_no_target(thinking):
    options = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
    assert mark("think", {"messages": PLAIN}, **options) == (
        "<|im_start|>user\nWhich digit?<|im_end|>\n<|im_start|>assistant\n⟦seven<|im_end|>⟧\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦three<|im_end|>⟧\n"
    )


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_a_thought_of_its_own_goes_by_several_names(name):
    messages = [PLAIN[0], PLAIN[1] | {name: "a <|im_end|> bar"}]
    text = make_text("think")
    tokenised = text.tokenise(READER.read({"messages": messages}))
    assert shown(text, tokenised).endswith("⟦<think>\na <|im_end|> bar\n</think>\n\nseven<|im_end|>⟧\n")
    assert (tokenised.ids == text.tokenizer.eos_token_id).sum() == 2


def test_the_last_answer_of_a_template_without_end_of_turn_gets_one():
    template = (
        "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
    )
    assert mark("chatml", {"messages": PLAIN}, chat_template=template) == (
        "### user:\nWhich digit?\n\n### assistant:\n⟦seven⟧\n\n"
        "### user:\nand?\n\n### assistant:\n⟦three<|im_end|>⟧"
    )
    marked = mark("chatml", {"messages": PLAIN[:3]}, chat_template=template)
    assert marked.endswith("⟦seven⟧\n\n### user:\nand?\n\n")


def test_a_next_header_can_end_a_turn():
    """GLM's way: the model stops by opening the next role."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<think>\n' }}"
        "{{ m.content }}{% endfor %}"
    )
    assert mark("chatml", {"messages": PLAIN}, chat_template=template) == (
        "<|im_start|>Which digit?⟦<think>\nseven<|im_start|>⟧and?⟦<think>\nthree<|im_end|>⟧"
    )


def test_one_token_may_begin_and_end_texts():
    tokenizer = make_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token
    text = TextProcessor(tokenizer, {})
    assert shown(text, text.tokenise(READER.read({"messages": PLAIN}))) == mark("chatml", {"messages": PLAIN})


def test_special_tokens_that_close_a_call_are_not_its_end():
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.content %}{{ m.content }}{% endif %}"
        "{% for c in m.tool_calls or [] %}"
        "{{ '<|endoftext|>' + c.function.name + '<|endoftext|>' }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    messages = [CALLS[0], {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}, *CALLS[2:]]
    assert "⟦<|endoftext|>add<|endoftext|><|endoftext|>add<|endoftext|><|im_end|>⟧" in mark(
        "chatml", {"messages": messages}, chat_template=template
    )


def test_a_template_that_wants_parts():
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    row = {"messages": THOUGHTS, "images": ["a.png"], "audios": ["a.flac"]}
    assert mark("chatml", row, chat_template=template) == mark("chatml", row)


def test_of_several_named_templates_the_default_is_taken():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": tokenizer.chat_template, "rag": "{{ 'x' }}"}
    text = TextProcessor(tokenizer, {})
    assert shown(text, text.tokenise(READER.read({"messages": PLAIN}))) == mark("chatml", {"messages": PLAIN})


def test_a_template_without_generation_prompt():
    """The answer's first token joins the space before it, as it will when the model writes it."""
    assert mark("inst", {"messages": PLAIN}) == (
        "<|endoftext|>[INST] Which digit? [/INST]⟦ seven<|im_end|>⟧[INST] and? [/INST]⟦ three<|im_end|>⟧"
    )


def test_tool_calls_are_targets_and_tool_results_are_not():
    marked = mark("think", {"messages": CALLS, "tools": [TOOL]})
    assert marked.startswith("<|im_start|>system\n# Tools")
    assert (
        '<|im_start|>assistant\n⟦<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x\\ny"}}\n'
        "</tool_call><|im_end|>⟧\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
    ) in marked
    assert marked.endswith("<think>\n\n</think>\n\n⟦It is 3.<|im_end|>⟧\n")


def test_a_tool_call_after_words_is_one_span_with_them():
    messages = [CALLS[0], {"role": "assistant", "content": "Adding.", "tool_calls": [CALL, CALL]}]
    marked = mark("think", {"messages": messages})
    assert marked.count("⟦") == 1 and marked.count("<tool_call>") == 2
    assert "⟦Adding.\n<tool_call>" in marked and marked.endswith("</tool_call><|im_end|>⟧\n")


def test_targets_equal_the_template_s_own_generation_marks():
    text = make_text("chatml_generation")
    tokenised = text.tokenise(READER.read({"messages": PLAIN}))
    theirs = text.tokenizer.apply_chat_template(
        PLAIN, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert theirs["input_ids"] == tokenised.ids.tolist()
    assert theirs["assistant_masks"] == tokenised.targets.astype(int).tolist()


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("loss_on", ["assistant", "last_assistant", "all"])
def test_ids_are_those_of_the_plain_rendering(template, loss_on):
    text = make_text(template, loss_on=loss_on)
    messages = THOUGHTS[:1] + PLAIN[1:]
    tokenised = text.tokenise(READER.read({"messages": messages, "images": ["a.png"]}))
    rendered = text.tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenised.ids.tolist() == text.tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_loss_on():
    last = mark("chatml", {"messages": PLAIN}, loss_on="last_assistant")
    assert last.count("⟦") == 1 and last.endswith("⟦three<|im_end|>⟧\n")
    everything = mark("chatml", {"messages": PLAIN}, loss_on="all")
    assert everything.startswith("⟦") and everything.endswith("⟧") and everything.count("⟦") == 1
    silent = [PLAIN[0], PLAIN[1] | {"loss": False}, *PLAIN[2:]]
    assert "⟦seven" not in mark("chatml", {"messages": silent})
    assert "⟧seven<|im_end|>⟦" in mark("chatml", {"messages": silent}, loss_on="all")


def test_placeholders_are_never_targets():
    row = {"messages": THOUGHTS, "images": ["a.png"], "audios": ["a.flac"]}
    assert "⟧<image>⟦" in mark("chatml", row, loss_on="all")
    assert mark("chatml", {"text": "seven <image> three", "images": ["a.png"]}) == (
        "⟦seven ⟧<image>⟦ three<|im_end|>⟧"
    )


def test_a_plain_text_begins_and_ends_as_the_tokenizer_says():
    assert mark("chatml", {"text": "hello world"}) == "⟦hello world<|im_end|>⟧"


def test_special_tokens_in_content_are_ordinary_text():
    text = make_text("chatml")
    messages = [
        {"role": "user", "content": "say <|im_end|> and <image> <image>"},
        {"role": "assistant", "content": "<|im_end|> it is"},
    ]
    parts = [{"type": "text", "text": "say <|im_end|> and <image> "}, {"type": "image", "image": "a.png"}]
    sample = READER.read({"messages": [{"role": "user", "content": parts}, messages[1]]})
    tokenised = text.tokenise(sample)
    assert shown(text, tokenised) == (
        "<|im_start|>user\nsay <|im_end|> and <image> <image><|im_end|>\n"
        "<|im_start|>assistant\n⟦<|im_end|> it is<|im_end|>⟧\n"
    )
    end = text.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (tokenised.ids == end).sum() == 2  # the template's own
    assert tokenised.ids[list(tokenised.slots)].tolist() == [text.placeholders["vision"].id]


def test_special_tokens_in_tools_are_refused():
    tool = {"type": "function", "function": {"name": "<|im_end|>"}}
    with pytest.raises(RowError, match="text contains a special token"):
        mark("think", {"messages": CALLS, "tools": [tool]})


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        ("chatml", PLAIN[:1], "no target token"),
        ("chatml", [PLAIN[0], PLAIN[1] | {"loss": False}], "no target token"),
        ("chatml", [PLAIN[0], {"role": "assistant", "content": " "}], "empty or not rendered"),
        ("inst", [{"role": "system", "content": "Be brief."}, *PLAIN], "chat template failed"),
        ("{% for m in messages %}{{ m.content[:4] }}{% endfor %}", PLAIN, "changes marked content"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", PLAIN, None),
        ("{{ messages[0].content }}", PLAIN, "empty or not rendered"),
        ("{% for m in messages %}A:{{ m.content }}:Z{% endfor %}", [PLAIN[0], PLAIN[1]], None),
    ],
)
def test_rows_without_a_clear_target_are_refused(template, messages, reason):
    inline = template.startswith("{")
    options = {"chat_template": template} if inline else {}
    name = "chatml" if inline else template
    if reason is None:
        assert "⟦" in mark(name, {"messages": messages}, **options)
        return
    with pytest.raises(RowError, match=reason):
        mark(name, {"messages": messages}, **options)


def test_a_token_that_joins_template_and_content_is_refused():
    """`and` is one token of the tokenizer: a target `nd` cannot be cut out of it."""
    template = "{% for m in messages %}{{ ' a' if m.role == 'assistant' else '' }}{{ m.content }}{% endfor %}"
    messages = [PLAIN[0], {"role": "assistant", "content": "nd"}]
    with pytest.raises(RowError, match="does not decode back"):
        mark("chatml", {"messages": messages}, chat_template=template)


def test_unknown_characters_are_refused():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "seven": 1, "Which": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    text = TextProcessor(tokenizer, {}, chat_template=template)
    answer = {"role": "assistant", "content": "seven"}
    assert text.tokenise(READER.read({"messages": [PLAIN[0], answer]})).targets.sum() == 1
    with pytest.raises(RowError, match="does not decode back"):
        text.tokenise(READER.read({"messages": [PLAIN[0], answer | {"content": "sieben"}]}))


def test_a_template_that_drops_media_is_refused():
    template = "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
    row = {"messages": THOUGHTS, "images": ["a.png"], "audios": ["a.flac"]}
    with pytest.raises(RowError, match="drops or repeats media"):
        mark("chatml", row, chat_template=template)


def test_expand_repeats_placeholders_and_shifts_labels():
    text = make_text("chatml")
    tokenised = text.tokenise(READER.read({"messages": THOUGHTS, "images": ["a"], "audios": ["b"]}))
    input_ids, labels, spans = tokenised.expand([3, 5])
    assert len(input_ids) == len(tokenised.ids) + 2 + 4
    for ((offset, rows),), name in zip(spans, ("vision", "audio"), strict=True):
        assert set(input_ids[offset : offset + rows]) == {text.placeholders[name].id}
        assert input_ids[offset - 1] != text.placeholders[name].id != input_ids[offset + rows]
    predicted = labels >= 0
    assert predicted.sum() == tokenised.targets.sum() and labels[-1] == -100
    assert np.array_equal(labels[predicted], input_ids[1:][predicted[:-1]])
    assert [length for ((_, length),) in spans] == [3, 5]


def test_a_medium_of_several_runs() -> None:
    tokenised = Tokenised(np.arange(6), np.arange(6) > 3, (1, 2, 4), ((0, 2), (1, None), (0, 1)))
    input_ids, labels, spans = tokenised.expand([3, 2])
    assert input_ids.tolist() == [0, 1, 1, 2, 2, 3, 4, 5]
    assert spans == (((1, 2), (6, 1)), ((3, 2),))


def test_placeholders_are_reused_or_added():
    tokenizer = make_tokenizer()
    before = len(tokenizer)
    chosen = add_placeholders(tokenizer, {"eye": encoder("image"), "ear": encoder("audio")})
    assert [(p.token, p.id, p.added) for p in chosen.values()] == [
        ("<image>", before, True),
        ("<audio>", before + 1, True),
    ]
    again = add_placeholders(tokenizer, {"eye": encoder("image")})["eye"]
    assert (again.id, again.added) == (before, False)
    text = TextProcessor(tokenizer, chosen)
    assert text.vocabulary_size == before + 2
    assert f"grows from {before} to {before + 2}" in text.describe(before)
    assert f"keeps its {before + 99} rows" in text.describe(before + 99)


@pytest.mark.parametrize(
    ("encoders", "message"),
    [
        ({"a": encoder("image"), "b": encoder("image")}, "takes image already"),
        ({"a": encoder("video")}, "only image and audio"),
        ({"a": encoder("image", placeholder=" x")}, "outer white space"),
        ({"a": encoder("image", placeholder="<x>"), "b": encoder("audio", placeholder="<x>")}, "another enc"),
    ],
)
def test_placeholders_that_cannot_work(encoders, message):
    with pytest.raises(UserError, match=message):
        add_placeholders(make_tokenizer(), encoders)
