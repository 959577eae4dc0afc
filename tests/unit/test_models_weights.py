"""Loading HF checkpoints of every layout into the modules, and fresh weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    CLIPModel,
    Siglip2Model,
    SiglipModel,
    WhisperForConditionalGeneration,
)

from models.encoders import RuntimeEncoders, build_encoder
from models.hf_config import load_hf_config
from models.llm import build_llm_layers
from models.weight_names import map_names
from models.weights import (
    PartWeights,
    WeightSource,
    check_weights,
    empty_parameters,
    fill_module,
    init_module,
    llm_weights,
    load_module,
    tower_weights,
)
from omni_ds.errors import UserError
from omni_ds.plan.region import Region
from tests.unit.model_helpers import ENCODERS, VITS, WHISPER, encoder_section, llm_config


def save(model: nn.Module, folder: Path, shard: str = "5GB") -> dict[str, torch.Tensor]:
    """Save with every parameter distinct from its initial value, so that a skipped one would show."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size=shard)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def load_llm(folder: Path, config) -> dict[str, torch.Tensor]:
    weights = llm_weights(str(folder), config)
    loaded = {}
    for definition in build_llm_layers(config):
        with empty_parameters():
            module = definition.build()
        assert all(parameter.is_meta for parameter in module.parameters())
        fill_module(module, module.hf_names(), [weights], seed=0)
        loaded |= {name: module.get_parameter(local) for local, name in module.hf_names().items()}
    check_weights([weights])
    return loaded


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_llm_round_trip(tmp_path: Path, name: str, shard: str) -> None:
    config = AutoConfig.for_model(**llm_config(name))
    saved = save(AutoModelForCausalLM.from_config(config), tmp_path, shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "20KB")
    loaded = load_llm(tmp_path, config)
    assert set(loaded) == {f"llm.{name}" for name in saved}
    for name, value in saved.items():
        assert torch.equal(loaded[f"llm.{name}"], value), name


def test_base_model_and_legacy_names(tmp_path: Path) -> None:
    """A base model lacks the ``model.`` prefix; old checkpoints carry rotary buffers."""
    config = AutoConfig.for_model(**llm_config("qwen3"))
    saved = save(AutoModel.from_config(config), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, file)
    loaded = load_llm(tmp_path, config)
    for name, value in saved.items():
        assert torch.equal(loaded[f"llm.model.{name}"], value), name


def test_problems_are_listed_together(tmp_path: Path) -> None:
    config = AutoConfig.for_model(**llm_config("llama"))
    save(AutoModelForCausalLM.from_config(config), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.gate_proj.weight"] = torch.zeros(3, 32)
    tensors["model.layers.0.mlp.surprise.weight"] = torch.zeros(1)
    save_file(tensors, file)
    with pytest.raises(UserError) as caught:
        load_llm(tmp_path, config)
    message = str(caught.value)
    assert "missing: llm.model.layers.1.mlp.up_proj.weight" in message
    assert "unexpected: model.layers.0.mlp.surprise.weight" in message
    assert "gate_proj.weight is [3, 32], the config says [48, 32]" in message
    assert str(tmp_path) in message


def tower(name: str, folder: Path | None, **keys):
    """(encoder filled from the folder, its weights)."""
    section = encoder_section(None, path=str(folder), modality=keys.pop("modality", "image"), **keys)
    config = load_hf_config(section, "encoder")
    with empty_parameters():
        encoder = build_encoder(name, section, config, 24)
    weights = tower_weights(name, str(folder), config, encoder.config)
    fill_module(encoder, encoder.hf_names(), [weights], seed=0)
    return encoder, weights


def assert_loaded(encoder: nn.Module, saved: dict[str, torch.Tensor], prefix: str = "") -> None:
    for name, parameter in encoder.tower.named_parameters():
        assert torch.equal(parameter, saved[prefix + name]), name


@pytest.mark.parametrize("name", list(VITS))
def test_tower_round_trip(tmp_path: Path, name: str) -> None:
    saved = save(AutoModel.from_config(AutoConfig.for_model(**VITS[name])), tmp_path)
    encoder, weights = tower("vision", tmp_path, feature_layer=-2)
    check_weights([weights])
    assert_loaded(encoder, saved)
    assert len(encoder.tower.encoder.state_dict()) < len([n for n in saved if n.startswith("encoder.")])
    assert any(".2." in name for name in weights.unused)  # the layer above the feature layer
    images = [torch.randn(3, 16, 16)]
    assert encoder(images).isfinite().all()  # non-persistent buffers survived the meta device


@pytest.mark.parametrize(
    ("cls", "kind", "name"),
    [(SiglipModel, "siglip", "siglip"), (Siglip2Model, "siglip2", "naflex"), (CLIPModel, "clip", "clip")],
)
def test_tower_out_of_a_two_tower_model(tmp_path: Path, cls, kind, name) -> None:
    vision = {k: v for k, v in VITS[name].items() if k != "model_type"}
    text = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 4, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, vision_config=vision, text_config=text)
    saved = save(cls(config), tmp_path)
    encoder, weights = tower("vision", tmp_path)
    check_weights([weights])
    assert_loaded(encoder, saved, "vision_model.")
    assert any(name.startswith("text_model.") for name in weights.unused)
    assert "logit_scale" in weights.unused


def test_legacy_vision_prefix(tmp_path: Path) -> None:
    """Vision towers of the hub were saved under ``vision_model.``."""
    saved = save(AutoModel.from_config(AutoConfig.for_model(**VITS["siglip"])), tmp_path)
    file = tmp_path / "model.safetensors"
    legacy = {f"vision_model.{k.removeprefix('vision_model.')}": v for k, v in load_file(file).items()}
    legacy["vision_model.embeddings.position_ids"] = torch.arange(16)[None]
    save_file(legacy, file)
    encoder, weights = tower("vision", tmp_path)
    check_weights([weights])
    assert_loaded(encoder, saved)


def test_legacy_dinov2_attention_and_fused_swiglu(tmp_path: Path) -> None:
    """Old DINOv2 names, whose gated MLP is one fused matrix: transformers' renamings and conversions."""
    saved = save(AutoModel.from_config(AutoConfig.for_model(**VITS["dinov2-swiglu"])), tmp_path)
    file = tmp_path / "model.safetensors"
    legacy: dict[str, torch.Tensor] = {}
    renames = {
        "attention.q_proj": "attention.attention.query",
        "attention.k_proj": "attention.attention.key",
        "attention.v_proj": "attention.attention.value",
        "attention.o_proj": "attention.output.dense",
        "mlp.down_proj": "mlp.weights_out",
    }
    for name, value in saved.items():
        for new, old in renames.items():
            name = name.replace(new, old)
        legacy[name] = value
    for name in [n for n in legacy if "mlp.gate_proj" in n]:
        up = legacy.pop(name.replace("gate_proj", "up_proj"))
        legacy[name.replace("gate_proj", "weights_in")] = torch.cat([legacy.pop(name), up])
    save_file(legacy, file)
    encoder, weights = tower("vision", tmp_path)
    check_weights([weights])
    assert_loaded(encoder, saved)


def test_whisper_encoder_out_of_a_whole_model(tmp_path: Path) -> None:
    saved = save(WhisperForConditionalGeneration(AutoConfig.for_model(**WHISPER)), tmp_path)
    encoder, weights = tower("audio", tmp_path, modality="audio")
    check_weights([weights])
    assert_loaded(encoder, saved, "model.encoder.")
    assert weights.unused and all(name.startswith(("model.decoder.", "proj_out")) for name in weights.unused)


def test_unexpected_tower_weight(tmp_path: Path) -> None:
    save(AutoModel.from_config(AutoConfig.for_model(**VITS["clip"])), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"encoder.layers.7.self_attn.q_proj.weight": torch.zeros(2)}, file)
    _, weights = tower("vision", tmp_path)
    with pytest.raises(UserError, match=r"unexpected: encoder\.layers\.7"):
        check_weights([weights])


def test_slices(tmp_path: Path) -> None:
    save_file(
        {"weight": torch.arange(24.0).view(6, 4), "bias": torch.arange(6.0)}, tmp_path / "a.safetensors"
    )
    source = WeightSource(str(tmp_path / "a.safetensors"))
    assert source.shape("weight") == (6, 4) and set(source.names()) == {"weight", "bias"}
    assert torch.equal(source.read("weight", (slice(2, 4), slice(1, 3))), torch.tensor([[9.0, 10], [13, 14]]))
    config = AutoConfig.for_model(**llm_config("llama"))
    saved = save(AutoModelForCausalLM.from_config(config), tmp_path / "llm")
    half = nn.Linear(32, 24, bias=False)
    weights = llm_weights(str(tmp_path / "llm"), config)
    name = "llm.model.layers.0.mlp.up_proj.weight"
    taken = load_module(half, {"weight": name}, weights, regions={"weight": Region.of((48, 32), 0, 24, 48)})
    assert taken == {"weight"}
    assert torch.equal(half.weight, saved[name.removeprefix("llm.")][24:])


def test_experts_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints hold experts separately, the model fuses them: in order of number, and only those held."""
    experts = {f"mlp.experts.{e}.{n}_proj.weight": (e, n) for e in range(12) for n in ("gate", "up")}
    tensors = {
        f"model.layers.0.{name}": torch.full((3, 4), float(e if n == "gate" else -e))
        for name, (e, n) in experts.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    sizes = {"num_experts": 12, "moe_intermediate_size": 3, "hidden_size": 4, "num_hidden_layers": 1}
    model_config = AutoConfig.for_model("qwen3_moe", vocab_size=8, num_attention_heads=2, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    source = WeightSource(str(tmp_path))
    weights = PartWeights(
        source, "llm.", model, map_names(source.names(), model, shape_of=source.shape), lambda _: True
    )
    read = []
    original = WeightSource.read
    monkeypatch.setattr(
        WeightSource, "read", lambda self, name, index=None: read.append(name) or original(self, name, index)
    )
    name = "llm.model.layers.0.mlp.experts.gate_up_proj"
    assert weights.shape(name) == (12, 6, 4) and not read
    gate, up = (weights.read(name, (slice(9, 11), part)) for part in (slice(0, 3), slice(3, 6)))
    assert len(read) == len(set(read)) == 4
    assert torch.equal(gate[:, 0, 0], torch.tensor([9.0, 10.0])) and torch.equal(up, -gate)
    assert torch.equal(weights.read(name)[:, 0, 0], torch.arange(12.0))


def test_pickle_is_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match="safetensors"):
        WeightSource(str(tmp_path), "omni.llm.path")


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"omni\.llm\.path"):
        WeightSource("no-such/repository", "omni.llm.path")
    with pytest.raises(UserError, match="neither"):
        WeightSource(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="fetch it again"):
        WeightSource(str(tmp_path)).names()
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="model-00001"):
        WeightSource(str(tmp_path)).read("a")


def fresh_llm(config, seed: int, meta: bool) -> dict[str, torch.Tensor]:
    values = {}
    definitions = build_llm_layers(config)
    for definition in reversed(definitions) if meta else definitions:
        if meta:
            with empty_parameters():
                module = definition.build()
        else:
            module = definition.build()
        init_module(module, module.hf_names(), seed, std=0.02)
        values |= {name: module.get_parameter(local).detach() for local, name in module.hf_names().items()}
    return values


def test_fresh_weights_depend_on_seed_and_name_alone() -> None:
    config = AutoConfig.for_model(**llm_config("llama-tied-rope-bias"))
    first, second, other = (
        fresh_llm(config, 1, False),
        fresh_llm(config, 1, True),
        fresh_llm(config, 2, False),
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    up, gate = (first[f"llm.model.layers.0.mlp.{n}_proj.weight"] for n in ("up", "gate"))
    assert not torch.equal(up, gate) and not torch.equal(up, other["llm.model.layers.0.mlp.up_proj.weight"])
    assert abs(up.std().item() - 0.02) < 0.002
    assert torch.equal(first["llm.model.norm.weight"], torch.ones(32))
    assert not first["llm.model.layers.0.self_attn.q_proj.bias"].any()
    assert not first["llm.model.embed_tokens.weight"][0].any()


@pytest.mark.parametrize("name", list(ENCODERS))
def test_fresh_encoders_are_complete(name: str) -> None:
    config = AutoConfig.for_model(**ENCODERS[name])
    section = encoder_section(ENCODERS[name])
    with empty_parameters():
        encoders = RuntimeEncoders({"x": build_encoder("x", section, config, 24)}, 24)
    assert encoders.hf_names() == {n: n for n, _ in encoders.named_parameters()}
    fill_module(encoders, encoders.hf_names(), [], seed=3)
    assert not any(parameter.is_meta for parameter in encoders.parameters())
    encoder = encoders.encoders["x"]
    assert {f"encoders.x.{local}": name for local, name in encoder.hf_names().items()} == {
        name: name for name in encoders.hf_names()
    }
    assert encoder(encoder.minimal_values("cpu", torch.float32)).isfinite().all()
    for parameter_name, parameter in encoders.named_parameters():
        if parameter_name.endswith("lambda1"):
            assert (parameter == config.layerscale_value).all()
    if name == "whisper":
        reference = WhisperForConditionalGeneration(config).model.encoder.embed_positions.weight
        torch.testing.assert_close(encoder.tower.embed_positions.weight, reference)


def test_bf16_parameters_keep_their_dtype(tmp_path: Path) -> None:
    config = AutoConfig.for_model(**llm_config("llama"))
    saved = save(AutoModelForCausalLM.from_config(config), tmp_path)
    layer = build_llm_layers(config)[1].build().bfloat16()
    fill_module(layer, layer.hf_names(), [llm_weights(str(tmp_path), config)], seed=0)
    weight = layer.layer.mlp.up_proj.weight
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, saved["model.layers.0.mlp.up_proj.weight"].bfloat16())
