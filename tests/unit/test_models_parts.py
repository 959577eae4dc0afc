"""Configs, masks, attention back ends, freezing, layer lists."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig

import models
import models.attention
from models.attention import BACKENDS, describe_backend, omni_attention, select_backend
from models.encoders import build_encoder
from models.freeze import set_trainable
from models.hf_config import load_hf_config
from models.llm import DecoderLayer, EmbedLayer, build_llm_layers, layer_mask, tied_losses
from models.masks import MaskSpec, Packing, bucket_lengths
from omni_ds.config.parts import LLMConfig
from omni_ds.errors import UserError
from tests.unit.model_helpers import ENCODERS, VITS, WHISPER, encoder_section, llm_config


def dense_attention(q, k, v, segments, mask: MaskSpec, scale: float) -> torch.Tensor:
    """The definition: one dense mask over the packed sequence. [T, A, D]."""
    ids = torch.repeat_interleave(torch.arange(len(segments)), torch.tensor(segments))
    steps = torch.arange(sum(segments))
    allowed = ids[:, None] == ids
    distance = steps[:, None] - steps
    if mask.causal:
        allowed &= distance >= 0
    if mask.window is not None:
        allowed &= distance < mask.window
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("tad,sad->ats", q, k) * scale
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("ats,sad->tad", weights, v)


@pytest.mark.parametrize("mask", [MaskSpec(), MaskSpec(causal=True), MaskSpec(causal=True, window=3)])
@pytest.mark.parametrize("segments", [(5, 5, 5), (40, 3, 17, 1, 33, 17), (7,), (1, 1), (60, 2)])
def test_sdpa_blocks_are_the_dense_mask(segments: tuple[int, ...], mask: MaskSpec) -> None:
    torch.manual_seed(0)
    tokens = sum(segments)
    q = torch.randn(1, 4, tokens, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 2, tokens, 8, dtype=torch.float64, requires_grad=True) for _ in "kv")
    out, _ = omni_attention(nn.Module(), q, k, v, Packing.of(segments, "cpu", mask), scaling=0.3)
    twins = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    expected = dense_attention(*(x[0].transpose(0, 1) for x in twins), segments, mask, 0.3)
    torch.testing.assert_close(out[0], expected)
    gradient = torch.randn_like(expected)
    out[0].backward(gradient)
    expected.backward(gradient)
    for ours, theirs in zip((q, k, v), twins, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_buckets_hold_like_lengths_once() -> None:
    lengths = [100, 3, 90, 70, 5, 76, 1]
    buckets = bucket_lengths(lengths)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(7))
    assert buckets == [[0, 2, 5], [3], [4, 1, 6]]


def test_groups_are_shared_between_masks() -> None:
    packing = Packing.of((3, 4), "cpu")
    assert packing.with_mask(MaskSpec(causal=True)).groups is packing.groups


def test_back_end_refuses_what_it_cannot_do() -> None:
    with pytest.raises(UserError, match="softcap"):
        select_backend(torch.device("cpu"), torch.float32, 8, MaskSpec(causal=True, softcap=30.0))


def test_no_back_end_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.attention.BACKENDS", tuple(b for b in BACKENDS if b.device == "cuda"))
    with pytest.raises(UserError, match="none of flash_attn_3, .*varlen runs on cpu in torch.float32"):
        select_backend(torch.device("cpu"), torch.float32, 8, MaskSpec(causal=True))


def test_back_end_choice() -> None:
    by_name = {backend.name: backend for backend in BACKENDS}
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert "flash_attn" in by_name and not by_name["flash_attn"].fits(cpu, torch.bfloat16, 64)
    assert not by_name["varlen"].fits(cuda, torch.float32, 64)
    assert not by_name["varlen"].fits(cuda, torch.bfloat16, 36)
    assert by_name["varlen"].fits(cuda, torch.bfloat16, 72)
    assert by_name["sdpa"].fits(cuda, torch.bfloat16, 36)
    assert select_backend(cpu, torch.float32, 64, MaskSpec(causal=True)).name == "sdpa"
    assert describe_backend(cpu, torch.float32).startswith("sdpa: ")


def test_flash_attn_4_alone_is_not_taken_for_2(tmp_path: Path) -> None:
    """They share a namespace; before and after something of it was imported. In a process of its own, where
    no other flash-attn can be."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text("flash_attn_varlen_func = None")
    program = (
        "import importlib, sys\n"
        "from models.flash_attention import _installed\n"
        f"sys.path[:] = [{str(tmp_path)!r}]\n"
        "for _ in range(2):\n"
        "    assert [_installed(generation) for generation in (2, 3, 4)] == [False, False, True]\n"
        "    importlib.import_module('flash_attn.cute')\n"
    )
    root = Path(models.__file__ or next(iter(models.__path__))).parents[1]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root, timeout=60)


def test_short_segments_go_to_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [replace(b, available=lambda: True) for b in BACKENDS if b.name in ("flash_attn_4", "varlen")]
    sdpa = BACKENDS[-1]
    cuda, causal = torch.device("cuda"), MaskSpec(causal=True)

    def chosen(backends: list, longest: int | None, mask: MaskSpec = causal) -> str:
        monkeypatch.setattr(models.attention, "BACKENDS", tuple(backends))
        return select_backend(cuda, torch.bfloat16, 64, mask, longest).name

    assert chosen([*kernels, sdpa], None) == chosen([*kernels, sdpa], 256) == "flash_attn_4"
    assert chosen([*kernels, sdpa], 255) == "varlen"
    assert chosen([*kernels, sdpa], 255, replace(causal, softcap=1.0)) == "flash_attn_4"


def test_layer_masks_follow_the_config() -> None:
    def masks(name: str, **changes):
        config = AutoConfig.for_model(**llm_config(name, **changes))
        return [layer_mask(config, index).window for index in range(config.num_hidden_layers)]

    assert masks("llama") == [None, None]
    assert masks("mistral-sliding") == [4, 4]
    assert masks("qwen2-sliding-half") == [None, 4]
    assert masks("qwen2-sliding-half", use_sliding_window=False) == [None, None]


def test_layer_list() -> None:
    untied = build_llm_layers(AutoConfig.for_model(**llm_config("llama")))
    assert [d.cls.__name__ for d in untied] == [
        "EmbedLayer",
        "DecoderLayer",
        "DecoderLayer",
        "NormLayer",
        "HeadLayer",
    ]
    assert all(d.tied_key is None for d in untied)
    tied = build_llm_layers(AutoConfig.for_model(**llm_config("qwen3")), recompute=True)
    assert tied[0].tied_key == tied[-1].tied_key and tied[-1].cls is EmbedLayer
    assert tied[-1].forward_fn is tied_losses and tied[0].forward_fn is None
    assert tied[1].cls is DecoderLayer and tied[1].build().recompute


def test_dropout_is_off() -> None:
    config = AutoConfig.for_model(**llm_config("llama", attention_dropout=0.5))
    assert build_llm_layers(config)[1].build().layer.self_attn.attention_dropout == 0.0
    assert config.attention_dropout == 0.5
    noisy = WHISPER | {
        "dropout": 0.5,
        "attention_dropout": 0.5,
        "activation_dropout": 0.5,
        "encoder_layerdrop": 0.5,
    }
    encoder = build_encoder("a", encoder_section(noisy), AutoConfig.for_model(**noisy), 24).train()
    clip = [torch.randn(8, 9)]
    assert torch.equal(encoder(clip), encoder(clip))


@pytest.mark.parametrize(
    ("part", "kind", "match"),
    [
        (LLMConfig(config={"model_type": "gpt2"}), "llm", "gpt2.*llama, mistral, qwen2, qwen3"),
        (LLMConfig(config={"model_type": "qwen2_vl_text"}), "llm", "qwen2_vl_text.*omni.model.path"),
        (LLMConfig(config={"model_type": "qwen2_5_vl_text"}), "llm", "qwen2_5_vl_text.*omni.model.path"),
        (LLMConfig(config={"vocab_size": 3}), "llm", 'no "model_type"'),
        (LLMConfig(config={"model_type": "no_such_type"}), "llm", "no_such_type"),
        (LLMConfig(config={"model_type": "llama", "hidden_size": "big"}), "llm", "hidden_size"),
        (LLMConfig(path="/no/such/folder"), "llm", "no folder /no/such/folder"),
        (LLMConfig(path="no-such/repository"), "llm", "no-such/repository"),
        (encoder_section({"model_type": "llama"}), "encoder", "llama.*whisper"),
        (
            LLMConfig(config=llm_config("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0})),
            "llm",
            "dynamic",
        ),
    ],
)
def test_config_errors(part, kind: str, match: str) -> None:
    with pytest.raises(UserError, match=match):
        load_hf_config(part, kind)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        load_hf_config(LLMConfig(path=str(tmp_path)), "llm")


def test_config_of_the_tower_inside_a_checkpoint() -> None:
    section = encoder_section({"model_type": "siglip", "vision_config": {"hidden_size": 48}})
    config = load_hf_config(section, "encoder")
    assert config.model_type == "siglip_vision_model" and config.hidden_size == 48


@pytest.mark.parametrize("tower", [True, False])
@pytest.mark.parametrize("projector", [True, False])
def test_freezing(tower: bool, projector: bool) -> None:
    config = VITS["dinov2"]
    section = encoder_section(config, freeze=not tower, projector={"freeze": not projector})
    encoder = build_encoder("v", section, AutoConfig.for_model(**config), 24)
    names = {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}
    assert any(name.startswith("tower.") for name in names) == tower
    assert any(name.startswith("projector.") for name in names) == projector
    assert not names & set(encoder.unused)
    rows = encoder([torch.randn(3, 16, 16)])
    assert rows.requires_grad == (tower or projector)
    if rows.requires_grad:
        rows.square().sum().backward()
        assert names == {name for name, p in encoder.named_parameters() if p.grad is not None}
    layer = build_llm_layers(AutoConfig.for_model(**llm_config("llama")))[1].build()
    set_trainable(layer, False)
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_default_feature_layer_is_llavas() -> None:
    for name, layers in (("clip", 2), ("siglip", 3), ("dinov2", 3)):
        encoder = build_encoder("v", encoder_section(VITS[name]), AutoConfig.for_model(**VITS[name]), 24)
        assert encoder.meta.layers == layers == len(encoder.layers)


def test_mlp_is_llavas_gelu() -> None:
    encoder = build_encoder("v", encoder_section(VITS["siglip"]), AutoConfig.for_model(**VITS["siglip"]), 24)
    x = torch.randn(16, 32)
    projector = encoder.projector
    expected = F.linear(
        F.gelu(F.linear(x, projector.linear_1.weight, projector.linear_1.bias)),
        projector.linear_2.weight,
        projector.linear_2.bias,
    )
    torch.testing.assert_close(projector(x, [(4, 4)]), expected)


@pytest.mark.parametrize("name", list(ENCODERS))
def test_weights_are_read_only_while_their_module_runs(name: str) -> None:
    """As ZeRO-3 requires: elsewhere a parameter is empty. One image needs interpolation."""
    torch.manual_seed(0)
    encoder = build_encoder("x", encoder_section(ENCODERS[name]), AutoConfig.for_model(**ENCODERS[name]), 24)
    values = [torch.randn(8, 33)] if name == "whisper" else [torch.randn(3, 16, 16), torch.randn(3, 8, 20)]
    expected = encoder(values)
    for module in encoder.modules():
        whole = {local: parameter.data for local, parameter in module.named_parameters(recurse=False)}

        def swap(module: nn.Module, *_: object, present: bool, whole: dict = whole) -> None:
            for local, value in whole.items():
                getattr(module, local).data = value if present else torch.empty(0)

        swap(module, present=False)
        module.register_forward_pre_hook(partial(swap, present=True))
        module.register_forward_hook(partial(swap, present=False))
    with torch.no_grad():
        torch.testing.assert_close(encoder(values), expected)


@pytest.mark.parametrize("name", list(ENCODERS))
def test_module_calls_do_not_depend_on_the_items(name: str) -> None:
    """Under ZeRO-3 a module call is a collective: ranks with other items must make the same ones in order."""
    encoder = build_encoder("x", encoder_section(ENCODERS[name]), AutoConfig.for_model(**ENCODERS[name]), 24)
    calls: list[str] = []
    for path, module in encoder.named_modules():
        module.register_forward_pre_hook(lambda *_, path=path: calls.append(path))
    shapes = [[(8, 33)], [(8, 95), (8, 2), (8, 40), (8, 21)]]
    if name != "whisper":
        shapes = [[(3, 16, 16)], [(3, 16, 16), (3, 8, 20), (3, 12, 12)]]
    seen = []
    for group in [*shapes, None]:
        calls.clear()
        values = (
            [torch.randn(shape) for shape in group] if group else encoder.minimal_values("cpu", torch.float32)
        )
        encoder(values)
        seen.append(list(calls))
    assert len(seen[0]) > 10
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("grid", [(5, 7), (7, 7), (16, 3), (1, 9)])
def test_positions_are_resized_as_torch_interpolates(grid, antialias):
    from models.encoders.resize import resize_grid

    table = torch.randn(7, 7, 5)
    expected = torch.nn.functional.interpolate(
        table.permute(2, 0, 1)[None], size=grid, mode="bicubic", align_corners=False, antialias=antialias
    )
    found = resize_grid(table, grid, antialias=antialias)
    torch.testing.assert_close(found, expected[0].flatten(1).T, rtol=1e-5, atol=1e-6)


def test_positions_of_many_grids_are_those_of_each():
    from models.encoders.resize import resize_grid, resize_grids

    table = torch.randn(7, 6, 5, dtype=torch.float64, requires_grad=True)
    grids = [(5, 7), (7, 7), (16, 3), (5, 7), (1, 9)]
    together, each = resize_grids(table, grids), [resize_grid(table, grid) for grid in grids]
    torch.testing.assert_close(list(together), each, rtol=1e-5, atol=1e-6)
    gradients = [
        torch.autograd.grad(torch.cat(list(some)).sin().sum(), table)[0] for some in (together, each)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
    assert resize_grids(table, []) == ()
