"""Images encoded in slices by gangs, and recordings in parts, against HF's towers on whole items.

Forked ranks, each with slices and short images of its own. Outputs, gradients of the input pixels and, summed
over ranks, of all parameters are the unsplit ones to 1e-5 of the largest element, through the projector.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn

from omni_ds.plan.long_short import split_item
from omni_ds.plan.sample import Item
from tests.unit.model_helpers import VITS, WHISPER

WORLD, TOLERANCE = 4, 1e-5
THREE_HEADS = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40}
SHUFFLE = {"reduction": "pixel_shuffle", "factor": 2}
STACK = {"reduction": "frame_stack", "factor": 4}
# Towers, with head numbers that do not divide by ranks, and projectors.
TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "siglip": (VITS["siglip"], {}),
    "siglip three heads shuffled": (VITS["siglip"] | THREE_HEADS, SHUFFLE),
    "siglip stacked": (VITS["siglip"] | THREE_HEADS, STACK),
    "clip three heads": (VITS["clip"] | THREE_HEADS, {}),
    "clip shuffled": (VITS["clip"], SHUFFLE),
    "dinov2 three heads": (VITS["dinov2"] | THREE_HEADS, {}),
    "dinov2 swiglu shuffled": (VITS["dinov2-swiglu"], SHUFFLE),
    "dinov2 registers": (VITS["dinov2-registers"] | THREE_HEADS, {}),
    "dinov2 registers shuffled": (VITS["dinov2-registers"], SHUFFLE),
}
# Pixels (patches of 4) and the gang: 2 is one for each half of the ranks, 4 for all; 1: each rank alone.
# Where rows are not joined in squares, token numbers do not divide by the gang.
ODD = (((20, 12), 2), ((28, 20), 4), ((16, 16), 2), ((12, 12), 1), ((8, 20), 1), ((8, 28), 4))
EVEN = (((24, 16), 2), ((40, 24), 4), ((16, 16), 2), ((16, 8), 1), ((8, 8), 1), ((32, 8), 4))
PARTS = ((130, 1), (95, 2), (40, 1), (7, 1))  # recordings: mel frames, windows of a part


def pixels(index: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + index))


def projected(encoder, features: Tensor, grid: tuple[int, int] | None) -> Tensor:
    """HF tower features -> rows, by plain operations on the encoder's projector weights."""
    projector, meta = encoder.projector, encoder.meta
    if meta.reduction == "pixel_shuffle":
        grid_features = features.view(*grid, -1)
        blocks = [
            grid_features[r : r + 2, c : c + 2].flatten()
            for r in range(0, grid[0], 2)
            for c in range(0, grid[1], 2)
        ]
        features = torch.stack(blocks)
    elif meta.reduction == "frame_stack":
        padding = -features.shape[0] % meta.factor
        features = F.pad(features, (0, 0, 0, padding)).reshape(-1, meta.factor * features.shape[1])
    return projector.linear_2(F.gelu(projector.linear_1(features)))


def build(config: dict[str, Any], projector: dict[str, Any]) -> tuple[Any, nn.Module, Any]:
    """Our encoder and HF's tower with the same weights, and a second projector for the latter."""
    from parity.test_layers_encoders import built, copy_tower, hf_vit, perturbed
    from transformers import AutoConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(3)
    whisper = config["model_type"] == "whisper"
    reference = perturbed(WhisperEncoder(AutoConfig.for_model(**config))) if whisper else hf_vit(config)
    encoder, other = (built(config, projector=projector) for _ in range(2))
    copy_tower(encoder, reference)
    other.load_state_dict(encoder.state_dict())
    return encoder, reference, other


def gradients(towers: nn.Module, projector: nn.Module, trained: set[str]) -> dict[str, Tensor]:
    named = [*towers.named_parameters(prefix="tower"), *projector.named_parameters(prefix="projector")]
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named if name in trained}


def apart(ours: Tensor, theirs: Tensor, floor: float = 0.0) -> float:
    """Largest difference over the largest element."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float((ours - theirs).abs().max() / max(float(theirs.abs().max()), floor))


def compare(encoder, reference, other, mine: dict[int, Tensor], whole: dict[int, Tensor], inputs) -> dict:
    """Gather rows (by index of the item: this rank's come at `at` of the whole), sum gradients, compare."""
    import torch.distributed as dist

    trained = {name for name, p in encoder.named_parameters() if p.requires_grad}
    found, expected = (
        gradients(e, p.projector, trained) for e, p in ((encoder.tower, encoder), (reference, other))
    )
    assert found.keys() == trained
    largest = max(float(t.abs().max()) for t in expected.values())
    result = {"parameters": {}, "inputs": {}, "outputs": {}}
    for name in sorted(trained):
        dist.all_reduce(found[name])
        # The gradient of a key bias is zero up to rounding.
        floor = 1e-2 * largest if name.endswith(("k_proj.bias", "key.bias")) else 0.0
        result["parameters"][name] = apart(found[name], expected[name], floor)
    for index, (ours, theirs) in inputs.items():
        gradient = torch.zeros_like(theirs) if ours.grad is None else ours.grad.clone()
        dist.all_reduce(gradient)
        result["inputs"][index] = apart(gradient, theirs.grad)
    for index, rows in mine.items():
        result["outputs"][index] = apart(rows, whole[index])
    return result


def vit_case(name: str) -> dict:
    """On every rank: encode this rank's slices and short images; then the same whole, by HF."""
    import torch.distributed as dist
    from parity.test_layers_encoders import hf_hidden_states

    from models.encoders import ItemSlice
    from omni_ds.engine.environment import TIMEOUT
    from omni_ds.parallel.layer_groups import create_gangs
    from omni_ds.plan.mesh import Mesh

    config, projector = TOWERS[name]
    encoder, reference, other = build(config, projector)
    meta, rank = encoder.meta, dist.get_rank()
    gangs = create_gangs(Mesh(1, WORLD), WORLD, TIMEOUT)
    outputs, whole, inputs, losses, short = {}, {}, {}, [], []
    for index, (size, gang) in enumerate(EVEN if meta.reduction == "pixel_shuffle" else ODD):
        image = pixels(index, (3, *size)).requires_grad_()
        again = image.detach().clone().requires_grad_()
        states = hf_hidden_states(reference, again)[meta.layers][0, meta.prefix :]
        rows = projected(other, states, (size[0] // meta.patch, size[1] // meta.patch))
        weights = pixels(1000 + index, tuple(rows.shape))
        (rows * weights).sum().backward()
        inputs[index] = (image, again)
        if gang == 1:
            if index % WORLD == rank:
                short.append((index, image, weights, rows.detach()))
            continue
        if gang == 2 and index % 4 // 2 != rank // 2:
            continue
        place = rank % gang
        tokens, cut = meta.slices(size, gang)
        first, stop = meta.slice_pixels(size, gang, place)
        made = encoder.forward_slice(image[:, first:stop], ItemSlice(place, tokens, gangs[gang], size))
        low, high = cut[place], cut[place + 1]
        outputs[index], whole[index] = made.detach(), rows.detach()[low:high]
        losses.append((made * weights[low:high]).sum())
    if short:
        made = encoder([image for _, image, *_ in short])
        parts = made.split([len(rows) for *_, rows in short])
        for (index, _, weights, rows), part in zip(short, parts, strict=True):
            outputs[index], whole[index] = part.detach(), rows
            losses.append((part * weights).sum())
    for loss in losses:  # collectives: in one order on all ranks of a gang
        loss.backward()
    return compare(encoder, reference, other, outputs, whole, inputs)


def whisper_case(projector: dict[str, Any]) -> dict:
    """Recordings cut between their windows, the parts dealt to ranks in turn."""
    import torch.distributed as dist
    from parity.test_layers_encoders import hf_whisper_truncated

    encoder, reference, other = build(WHISPER, projector)
    meta, rank = encoder.meta, dist.get_rank()
    outputs, whole, inputs, values, expected, turn = {}, {}, {}, [], [], 0
    for index, (frames, count) in enumerate(PARTS):
        clip = pixels(index, (meta.mels, frames)).requires_grad_()
        again = clip.detach().clone().requires_grad_()
        features = torch.cat(
            [hf_whisper_truncated(reference, window) for window in again.split(meta.window, dim=1)]
        )
        rows = projected(other, features, None)
        weights = pixels(1000 + index, tuple(rows.shape))
        (rows * weights).sum().backward()
        inputs[index] = (clip, again)
        segments, length = meta.measure((frames,))
        item = Item(0, index, meta.name, (frames,), segments, length, ((0, length),))
        at = 0
        for part in split_item(meta, item, count * meta.segments_per_slice):
            if turn % WORLD == rank:
                values.append(clip[:, part.start : part.start + part.shape[0]])
                expected.append((turn, rows.detach()[at : at + part.rows], weights[at : at + part.rows]))
            at, turn = at + part.rows, turn + 1
    made = encoder(values).split([len(rows) for _, rows, _ in expected])
    for part, (name, rows, _) in zip(made, expected, strict=True):
        outputs[name], whole[name] = part.detach(), rows
    sum((part * weights).sum() for part, (*_, weights) in zip(made, expected, strict=True)).backward()
    return compare(encoder, reference, other, outputs, whole, inputs)


RECORDINGS = {"whisper": {}, "whisper stacked": STACK}


def _all_cases() -> dict[str, dict]:
    found = {name: vit_case(name) for name in TOWERS}
    return found | {name: whisper_case(projector) for name, projector in RECORDINGS.items()}


@functools.cache
def results() -> list[dict[str, dict]]:
    import parity.test_layers_encoders  # noqa: F401  once, before ranks are forked

    return run_ranks(_all_cases, WORLD, timeout=90)


@pytest.mark.parametrize("name", [*TOWERS, *RECORDINGS])
def test_split_items_equal_whole_ones(name: str) -> None:
    seen = set()
    for rank, result in enumerate(results()):
        for what, differences in result[name].items():
            for where, difference in differences.items():
                assert difference < TOLERANCE, f"rank {rank}: {what} {where} differs by {difference}"
        seen |= result[name]["outputs"].keys()
    # Of a recording each part has a number of its own; a tower's images are one each.
    assert len(seen) >= len(ODD if name in TOWERS else PARTS)
    assert len(results()[0][name]["parameters"]) > 10
