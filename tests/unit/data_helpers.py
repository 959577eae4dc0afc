"""Small tokenizers, media and encoders for the tests of `data`."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data.placeholders import add_placeholders
from data.preprocess import build_preprocess
from data.text import TextProcessor
from omni_ds.config import EncoderConfig
from omni_ds.config.data import DataConfig, SourceConfig
from omni_ds.plan.encoder_meta import EncoderMeta

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


VIT = {
    "model_type": "siglip_vision_model",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
WHISPER = {
    "model_type": "whisper",
    "d_model": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 8,
    "num_mel_bins": 16,
    "max_source_positions": 20,
}
SECTIONS = {
    "vision": (VIT, {"modality": "image", "projector": {"reduction": "pixel_shuffle", "factor": 2}}),
    "audio": (WHISPER, {"modality": "audio", "projector": {"reduction": "frame_stack", "factor": 3}}),
}


def composition(text_options: dict | None = None, template: str = "chatml"):
    """(text, media, metas) of a vision and an audio encoder: 4 rows an image, a row for 6 mel frames."""
    sections = {name: EncoderConfig(config=hf, **values) for name, (hf, values) in SECTIONS.items()}
    text = make_text(template, sections, **(text_options or {}))
    media = {name: build_preprocess(name, sections[name], hf) for name, (hf, _) in SECTIONS.items()}
    metas = {
        name: EncoderMeta.from_config(name, sections[name], hf, 16) for name, (hf, _) in SECTIONS.items()
    }
    return text, media, metas


def source(path, **values) -> SourceConfig:
    return SourceConfig(path=str(path), **values)


def settings(**values) -> DataConfig:
    return DataConfig(train=[{"path": "unused"}], **values)


def rows_of_all_kinds() -> list[dict]:
    """Five rows about a.png, b.png, a.flac and b.flac: image, audio, several media, messages, plain text."""
    answer = {"role": "assistant", "content": "seven"}
    return [
        {
            "task": "look",
            "messages": [{"role": "user", "content": "<image>Which?"}, answer],
            "images": ["a.png"],
        },
        {
            "task": "listen",
            "messages": [{"role": "user", "content": "<audio>Which?"}, answer],
            "audios": ["a.flac"],
        },
        {
            "messages": [{"role": "user", "content": "<image> and <audio>, <image>, <audio>"}, answer],
            "images": ["a.png", "b.png"],
            "audios": ["b.flac", "a.flac"],
        },
        {
            "messages": [
                {"role": "user", "content": "hello"},
                answer,
                {"role": "user", "content": "and"},
                answer,
            ]
        },
        {"text": "The answer is seven."},
    ]
