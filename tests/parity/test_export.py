"""Exported folders in a process without this repository give the numbers that training computes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.parity.export_support import LLM, Case, Reference, audio, image

QWEN3 = LLM | {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True}
LLAMA = LLM | {"model_type": "llama"}
GEMMA3 = LLM | {
    "model_type": "gemma3_text",
    "head_dim": 8,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
}

CASES = [
    # Two encoders, tied head, whole clips and clips of several windows, images of two sizes, many shards.
    Case(
        "both",
        QWEN3,
        {"vision": image(reduction="pixel_shuffle", factor=2), "audio": audio()},
        max_shard_size="20KB",
    ),
    Case("padded_audio", LLAMA, {"ear": audio(factor=3, pad_to_window=True)}),
    Case("dino", LLM | {"model_type": "mistral", "sliding_window": 9}, {"eye": image(model_type="dinov2")}),
    Case("naflex", LLAMA, {"eye": image(model_type="siglip2_vision_model")}),
    Case("registers", GEMMA3, {"eye": image(model_type="dinov2_with_registers", feature_select="full")}),
    Case(
        "clip_stacked",
        LLAMA,
        {"eye": image(model_type="clip_vision_model", reduction="frame_stack", factor=3)},
    ),
    Case("half", QWEN3, {"eye": image(width=20)}, dtype=torch.bfloat16),
    Case("llava_clip", LLAMA, {"vision": image(model_type="clip_vision_model")}),
    Case("llava_clip_full", LLAMA, {"vision": image(model_type="clip_vision_model", feature_select="full")}),
    Case("llava_siglip", QWEN3, {"eye": image(feature_layer=-2)}),
    Case("text", QWEN3),
]
EAGER = {"both", "llava_clip"}
CLASSES = {"text": "Qwen3ForCausalLM"} | dict.fromkeys(
    ("llava_clip", "llava_clip_full", "llava_siglip"), "LlavaForConditionalGeneration"
)


def prompts_of(reference: Reference) -> list[dict]:
    """Two prompts of unlike length; the second has two media of each kind."""
    generator = torch.Generator().manual_seed(1)
    prompts = []
    for number in (1, 2):
        pieces, media = [torch.randint(10, 40, (3 * number,), generator=generator)], {}
        for name, encoder in reference.encoders.items():
            meta = encoder.meta
            native = (meta.image, meta.image)
            sizes = [native, native]
            if meta.family == "whisper":
                sizes = [(31,), (2 * meta.positions + 17,)]
            elif reference.case.name in ("both", "dino"):
                sizes = [native, (14, 42)]
            elif reference.case.name == "naflex":
                sizes = [(14, 42), (42, 7)]
            for size in sizes[-number:]:
                channels = meta.channels if meta.family == "vit" else meta.mels
                media.setdefault(name, []).append(torch.randn(channels, *size, generator=generator))
                rows = meta.measure(size)[1]
                pieces.append(torch.full((rows,), reference.placeholders[name]))
                pieces.append(torch.randint(10, 40, (2,), generator=generator))
        prompts.append({"ids": torch.cat(pieces), "by_name": media})
    for prompt in prompts:
        prompt["media"] = {reference.encoders[name].meta.modality: v for name, v in prompt["by_name"].items()}
    return prompts


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """case name -> (reference, prompts, export folder, outputs of the other process)."""
    root = tmp_path_factory.mktemp("exports")
    references = {}
    for case in CASES:
        reference = Reference(case)
        prompts = prompts_of(reference)
        reference.export(root / case.name / "model")
        inputs = {
            "prompts": [{"ids": p["ids"], "media": p["media"]} for p in prompts],
            "auto_class": "AutoModelForCausalLM"
            if case.name in ("text", "dino")
            else "AutoModelForImageTextToText",
            "kwargs": {"attn_implementation": "eager"} if case.name in EAGER else {},
            "want_state": True,
        }
        torch.save(inputs, root / case.name / "inputs.pt")
        references[case.name] = (reference, prompts)
    probe = Path(__file__).with_name("export_probe.py").read_text()
    home = tmp_path_factory.mktemp("home")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", probe, str(root)], cwd=home, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        name: (*pair, root / name / "model", torch.load(root / name / "outputs.pt"))
        for name, pair in references.items()
    }


@pytest.fixture(params=[case.name for case in CASES])
def result(request, results):
    return results[request.param]


def test_class_and_loading(result):
    reference, _, _, outputs = result
    assert outputs["class"] == CLASSES.get(reference.case.name, "OmniForConditionalGeneration")
    assert outputs["trouble"] == {}
    assert outputs["dtypes"] == [str(reference.case.dtype)]


def test_logits_equal_those_of_training(result):
    reference, prompts, _, outputs = result
    if reference.case.dtype != torch.float32:
        for module in (reference.llm, *reference.encoders.values()):
            module.to(reference.case.dtype)
    for prompt, logits in zip(prompts, outputs["logits"], strict=True):
        expected = reference.logits(prompt["ids"], prompt["by_name"])
        tolerance = 1e-5 if reference.case.dtype == torch.float32 else 0.03
        scale = expected.abs().max().item()
        assert (logits - expected).abs().max().item() <= tolerance * scale


def test_generation_alone_batched_and_with_beams(result):
    reference, prompts, _, outputs = result
    if reference.case.dtype == torch.float32:
        expected = [reference.greedy(p["ids"], p["by_name"], len(outputs["alone"][0])) for p in prompts]
        assert outputs["alone"] == expected
        assert outputs["together"] == expected
        assert outputs["beams"] == outputs["single_beams"]
        assert len({tuple(tokens) for tokens in expected}) == 2


def test_every_tensor_arrives_unchanged(result):
    reference, _, _, outputs = result
    exported = sorted(
        (tuple(t.shape), t.float().sum().item())
        for name, t in outputs["state"].items()
        if "lm_head" not in name
    )
    expected = sorted(
        (tuple(t.shape), t.detach().to(reference.case.dtype).float().sum().item())
        for name, t in reference.state().items()
        if "lm_head" not in name
    )
    assert exported == expected


def test_files_hold_the_names_of_the_hub(results):
    """DINOv2's modules were renamed between releases of transformers; the names in files were not."""
    *_, folder, _ = results["dino"]
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert "encoders.eye.tower.encoder.layer.0.attention.attention.query.weight" in names


def test_many_shards_have_an_index(results):
    *_, folder, _ = results["both"]
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert (folder / "model.safetensors.index.json").is_file()
