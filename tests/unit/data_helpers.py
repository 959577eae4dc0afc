"""Small tokenizers, media and encoders for the tests of `data`."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from data.placeholders import add_placeholders
from data.text import TextProcessor
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

GOLDEN = Path(__file__).parent / "golden" / "inspect"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ORDINARY = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CORPUS = [
    "user assistant system tool What is the sum of the written and the spoken digit? The answer is seven.",
    "Which digit is written? [INST] Which digit is spoken? [/INST] hello world, I think it is three or four.",
]


@cache
def _bpe() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ORDINARY])
    return tokenizer.to_str()


def make_tokenizer(template: str | None = "chatml", bos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE of about 400 tokens; template: name of a file in golden/inspect."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_bpe()),
        eos_token="<|im_end|>",
        bos_token="<|endoftext|>" if bos else None,
    )
    tokenizer.chat_template = (GOLDEN / f"{template}.jinja").read_text() if template else None
    return tokenizer


def encoder(modality: str, **values) -> SimpleNamespace:
    return SimpleNamespace(modality=modality, placeholder=values.pop("placeholder", None), **values)


def make_text(template: str | None = "chatml", encoders: dict | None = None, **options) -> TextProcessor:
    tokenizer = make_tokenizer(template, bos=template == "inst")
    encoders = {"vision": encoder("image"), "audio": encoder("audio")} if encoders is None else encoders
    return TextProcessor(tokenizer, add_placeholders(tokenizer, encoders), **options)


def shown(text: TextProcessor, tokenised) -> str:
    """The decoded sample with runs of targets in square brackets of their own kind."""
    out, inside = [], False
    for token, target in zip(tokenised.ids.tolist(), tokenised.targets.tolist(), strict=True):
        if target != inside:
            out.append("⟦" if target else "⟧")
            inside = target
        out.append(text.tokenizer.decode([token]))
    return "".join(out) + ("⟧" if inside else "")


def png(path: Path, height: int = 28, width: int = 28, value: int = 128) -> str:
    array = np.full((height, width, 3), value, dtype=np.uint8)
    array[: height // 2] = 255 - value
    Image.fromarray(array).save(path)
    return str(path)


def flac(path: Path, samples: int = 8000, rate: int = 16000) -> str:
    import soundfile

    time = np.arange(samples) / rate
    soundfile.write(path, 0.5 * np.sin(2 * np.pi * 440 * time), rate)
    return str(path)
