"""One image encoded by a group of ranks: features and gradients of the unsplit encoder, at any size."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from models.encoders import ItemSlice, build_encoder
from tests.ranks import run_ranks
from tests.unit.model_helpers import VITS, encoder_section

SIZES = [(24, 32), (64, 8), (32, 40), (72, 16)]
CASES = [(name, factor) for name in ("siglip", "naflex", "clip", "dinov2-registers") for factor in (1, 2)]


def encoder_of(name: str, factor: int):
    torch.manual_seed(0)
    projector = {"reduction": "pixel_shuffle", "factor": factor} if factor > 1 else {}
    section = encoder_section(VITS[name], projector=projector, processor={"max_pixels": 1024})
    encoder = build_encoder("v", section, AutoConfig.for_model(**VITS[name]), 24)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return encoder.double()


def both_ways() -> None:
    group = dist.group.WORLD
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name, factor in CASES:
        whole, split = encoder_of(name, factor), encoder_of(name, factor)
        for size in SIZES:
            torch.manual_seed(1)
            image = torch.randn(3, *size, dtype=torch.float64)
            expected = whole([image])
            weights = torch.randn_like(expected)
            (expected * weights).sum().backward()
            tokens, rows = whole.meta.slices(size, ranks)
            mine = split.forward_slice(image, ItemSlice(rank, tokens, group))
            part = slice(rows[rank], rows[rank + 1])
            assert (mine - expected[part]).abs().max() <= 1e-9, (name, factor, size)
            (mine * weights[part]).sum().backward()
        theirs = dict(whole.named_parameters())
        for local, parameter in split.named_parameters():
            if theirs[local].grad is None:
                continue
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient, group=group)
            scale = max(1.0, theirs[local].grad.abs().max().item())
            bound = 1e-6 if "position" in local else 1e-9  # positions are resized in fp32
            assert (gradient - theirs[local].grad).abs().max() <= bound * scale, (name, factor, local)


@pytest.mark.parametrize("ranks", [2, 3])
def test_slices_of_images_of_any_size(ranks: int) -> None:
    run_ranks(both_ways, ranks)
