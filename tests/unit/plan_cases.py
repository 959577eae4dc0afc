"""Tiny models and random samples for the plan tests: numbers only."""

from __future__ import annotations

import random
from types import SimpleNamespace

from omni_ds.plan.build import Plan, PlanOptions, build_plan
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.llm_meta import LLMMeta
from omni_ds.plan.mesh import Mesh
from omni_ds.plan.sample import Item, SampleMeta


def image_encoder(tower: bool = True, projector: bool = True) -> EncoderMeta:
    section = SimpleNamespace(
        modality="image",
        freeze=not tower,
        feature_layer=None,
        feature_select="patch",
        processor=SimpleNamespace(min_pixels=None, max_pixels=None),
        projector=SimpleNamespace(
            type="mlp", reduction="none", factor=1, hidden_size=None, freeze=not projector
        ),
    )
    config = {
        "model_type": "siglip_vision_model",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "image_size": 32,
        "patch_size": 8,
    }
    return EncoderMeta.from_config("image", section, config, 64)


def audio_encoder(tower: bool = True, projector: bool = True) -> EncoderMeta:
    section = SimpleNamespace(
        modality="audio",
        freeze=not tower,
        feature_layer=None,
        feature_select=None,
        processor=SimpleNamespace(pad_to_window=False),
        projector=SimpleNamespace(
            type="mlp", reduction="frame_stack", factor=4, hidden_size=None, freeze=not projector
        ),
    )
    config = {
        "model_type": "whisper",
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "num_mel_bins": 80,
        "max_source_positions": 50,
    }
    return EncoderMeta.from_config("audio", section, config, 64)


def llm(trainable: bool = True, layers: int = 8, tied: bool = True) -> LLMMeta:
    config = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 128,
        "tie_word_embeddings": tied,
    }
    return LLMMeta.from_config(config, trainable)


def plan_of(
    pipe: int = 2,
    data: int = 1,
    *,
    llm_trainable: bool = True,
    towers: bool = True,
    projectors: bool = True,
    encoders: bool = True,
    layers: int | None = None,
    sequence: int = 1,
    tensor: int = 1,
    expert: int = 1,
    **options,
) -> Plan:
    metas = (image_encoder(towers, projectors), audio_encoder(towers, projectors)) if encoders else ()
    options.setdefault("max_tokens_per_micro_batch", 256)
    return build_plan(
        llm(llm_trainable, layers or max(8, pipe)),
        metas,
        Mesh(pipe, data, sequence, tensor, expert),
        PlanOptions(**options),
    )


def random_samples(plan: Plan, count: int, seed: int, media: float = 0.7) -> tuple[SampleMeta, ...]:
    """Samples of a few dozen tokens with up to three media, some split over two spans of placeholders."""
    rng = random.Random(seed)
    samples = []
    for row in range(count):
        items, offset = [], rng.randrange(3)
        while plan.encoders and rng.random() < media and len(items) < 3:
            meta = rng.choice(plan.encoders)
            if meta.family == "vit":
                shape = (8 * rng.randint(1, 4), 8 * rng.randint(1, 4))
            else:
                shape = (rng.randint(1, 100),)
            segments, rows = meta.measure(shape)
            first = rng.randint(1, rows)
            spans = (
                ((offset, first), (offset + first + 1, rows - first)) if first < rows else ((offset, rows),)
            )
            items.append(Item(row, len(items), meta.name, shape, segments, rows, spans))
            offset += rows + 2 + rng.randrange(3)
        tokens = offset + rng.randint(2, 40)
        samples.append(SampleMeta(row, tokens, rng.randint(1, tokens - 1), tuple(items)))
    return tuple(samples)
