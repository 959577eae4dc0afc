"""One image encoded by a group of ranks: features and gradients of the unsplit encoder, at any size."""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import AutoConfig

from models.encoders import ItemSlice, build_encoder
from omni_ds.config import EncoderConfig
from tests.ranks import run_ranks
from tests.unit.model_helpers import VITS, encoder_section

SIZES = [(24, 32), (64, 8)]
CASES = [("siglip", 2), ("naflex", 1), ("naflex", 2), ("clip", 1), ("dinov2-registers", 2)]


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
        trained = [(n, p) for n, p in split.named_parameters() if theirs[n].grad is not None]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for _, p in trained])
        dist.all_reduce(flat, group=group)
        for (local, _), ours in zip(trained, flat.split([p.numel() for _, p in trained]), strict=True):
            gradient = theirs[local].grad.flatten()
            bound = 1e-6 if "position" in local else 1e-9  # positions are resized in fp32
            scale = max(1.0, gradient.abs().max().item())
            assert (ours - gradient).abs().max() <= bound * scale, (name, factor, local)


QWEN = {
    "qwen2_5_vl_vision": {
        "hidden_size": 24,
        "intermediate_size": 40,
        "out_hidden_size": 24,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen2_vl_vision": {"embed_dim": 24, "hidden_size": 24, "mlp_ratio": 2},
    "qwen3_vl_vision": {
        "hidden_size": 24,
        "intermediate_size": 40,
        "out_hidden_size": 24,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [2, 0],
    },
}


def qwen_both_ways() -> None:
    """Windows and whole images; rotary angles are in fp32, as in HF."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for kind, sizes in QWEN.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, depth=3, num_heads=3, patch_size=4, **sizes)
        whole, split = (build_encoder("v", EncoderConfig(), config, 24).double() for _ in range(2))
        split.load_state_dict(whole.state_dict())
        for size in [(40, 24), (56, 64)]:
            torch.manual_seed(1)
            image = torch.randn(3, *size, dtype=torch.float64)
            expected = whole([image])
            weights = torch.randn_like(expected)
            (expected * weights).sum().backward()
            tokens, rows = whole.meta.slices(size, ranks)
            first, stop = whole.meta.slice_pixels(size, ranks, rank)  # what the loader hands over
            part = ItemSlice(rank, tokens, dist.group.WORLD, size)
            mine = split.forward_slice(image[:, first:stop], part)
            held = slice(rows[rank], rows[rank + 1])
            assert (mine - expected[held]).abs().max() <= 1e-6, (kind, size)
            (mine * weights[held]).sum().backward()
        for (local, ours), theirs in zip(split.named_parameters(), whole.parameters(), strict=True):
            dist.all_reduce(ours.grad)
            scale = max(1.0, theirs.grad.abs().max().item())
            assert (ours.grad - theirs.grad).abs().max() <= 1e-6 * scale, (kind, local)


def test_slices_of_qwen_images() -> None:
    run_ranks(qwen_both_ways, 3)


def test_slices_of_images_of_any_size() -> None:
    run_ranks(both_ways, 3)
