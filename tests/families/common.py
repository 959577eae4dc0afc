"""What the tiny models share: sizes of the LLM, and the tokenizer."""

from __future__ import annotations

from tiny import DIGITS

TEXT = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def make_tokenizer(tokens: list[str], template: str):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DIGITS / "tokenizer")
    tokenizer.add_special_tokens({"additional_special_tokens": tokens}, replace_extra_special_tokens=False)
    tokenizer.chat_template = template
    return tokenizer
