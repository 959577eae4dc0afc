"""What a multimodal checkpoint comes out as: the same files, and after training the trained weights."""

import filecmp
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, family_config, make_model, other_names, rows_of
from parity.model_reference import hf_model, hf_samples
from ranks import run_ranks
from tiny import write_config
from worker import train_and_collect

BF16 = "bfloat16"
# In `make test`: one of those that are alike.
IDENTICAL = (
    "qwen2_5_vl",
    "qwen3_vl_moe",
    "llava_onevision",
    "internvl",
    "qwen2_audio",
    "gemma3",
    "qwen2_5_omni",
)
TRAINED = ("qwen2_5_vl", "qwen3_vl_moe", "llava_onevision", "gemma3", "qwen2_5_omni")


def export(config_path: str, steps: int, overrides: tuple[str, ...] = ()) -> str:
    """Train some steps and export, as a rank; returns the folder."""
    from omni_ds.config.load import load_config
    from omni_ds.engine.export import export_model
    from omni_ds.engine.launch import assemble
    from omni_ds.engine.step_input import prepare
    from omni_ds.parallel.agreement import agree_on_step

    run = assemble(load_config(config_path, overrides))
    runtime = run.runtime
    for batch in run.batches(0, steps):
        failed = agree_on_step(batch.step_plan, sorted({r for r, _ in batch.failed}), runtime.groups.control)
        runtime.executor.run(prepare(batch, runtime.rank, failed, runtime.device))
    return str(export_model(f"{run.config.omni.output_dir}/export", run.config, run.composition, runtime))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def assert_identical(one: Path, other: Path) -> None:
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name
    ours = {path.name for path in other.iterdir()} - {"omni_export.json"}
    weights = {name for name in ours if "safetensors" in name}
    side = {path.name for path in one.iterdir() if "safetensors" not in path.name}
    assert ours - weights == side
    assert filecmp.cmpfiles(one, other, side, shallow=False)[1:] == ([], [])


def config_of(family: str, folder: Path, model: Path, **omni: Any) -> str:
    rows = rows_of(family, folder / "rows")
    raw = family_config(family, model, rows, folder / "run", **omni)
    return str(write_config(raw, folder / "config.json"))


@pytest.mark.parametrize(
    "others", [pytest.param(False, marks=pytest.mark.full), True], ids=["saved", "other"]
)
@pytest.mark.parametrize(
    "family", [f if f in IDENTICAL else pytest.param(f, marks=pytest.mark.full) for f in FAMILIES]
)
def test_import_and_export_is_the_identity(family: str, others: bool, tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "model", tied=others, dtype=BF16)
    (model / "README.md").write_text("A card.\n")
    if others:
        other_names(family, model)
    config = config_of(family, tmp_path, model, export={"max_shard_size": "100KB"})
    layout = ("pipeline.stages=2",)
    if others and FAMILIES[family].experts:
        layout = ("expert_parallel.enabled=true", "expert_parallel.autoep_size=2")
    out = run_ranks(export, 2, config, 0, (*layout, "bf16.enabled=true"), timeout=120)[0]
    assert_identical(model, Path(out))


@pytest.mark.parametrize(
    "family", ["qwen2_5_omni_thinker", pytest.param("qwen3_omni_moe_thinker", marks=pytest.mark.full)]
)
def test_a_thinker_that_was_saved_alone_stays_alone(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "model", dtype=BF16)
    config = config_of(family, tmp_path, model)
    out = run_ranks(export, 2, config, 0, ("pipeline.stages=2", "bf16.enabled=true"), timeout=120)[0]
    assert_identical(model, Path(out))


@pytest.mark.parametrize(
    "family", [f if f in TRAINED else pytest.param(f, marks=pytest.mark.full) for f in FAMILIES]
)
def test_a_trained_export_reloads_with_the_trained_logits(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "model")
    config = config_of(family, tmp_path, model)
    out = run_ranks(export, 2, config, 3, ("pipeline.stages=2",), timeout=120)[0]
    rows = tmp_path / "rows" / "rows.jsonl"
    reloaded = run_ranks(losses, 1, out, str(rows), timeout=120)[0]
    assert reloaded != pytest.approx(run_ranks(losses, 1, str(model), str(rows), timeout=120)[0], rel=1e-2)
    again = tmp_path / "again"
    again.mkdir()
    sets = {"sets": {"all": {"path": str(rows)}}}
    trained = family_config(family, Path(out), rows, again, eval=sets)
    trained |= {"train_batch_size": 16}
    path = write_config(trained, again / "config.json")
    ours = run_ranks(train_and_collect, 1, str(path), (), 1, timeout=120)[0]["losses"][0]
    assert ours == pytest.approx(reloaded, rel=1e-5)


def losses(folder: str, rows: str) -> float:
    """Mean loss of the answers of all rows, by HF alone: the last ``<|assistant|>`` and what follows."""
    import torch.nn.functional as F

    hf = hf_model(Path(folder)).eval()
    samples = hf_samples(Path(folder), Path(rows))
    total, targets = 0.0, 0
    for number in range(len(samples.rows)):
        inputs = samples.inputs(number)
        labels = samples.labels(inputs["input_ids"][0])
        with torch.no_grad():
            logits = hf(**inputs).logits[0]
        total += float(F.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum"))
        targets += int((labels[1:] >= 0).sum())
    return total / targets


def test_the_export_says_which_dtype_it_has(tmp_path: Path) -> None:
    model = make_model("qwen2_5_vl", tmp_path / "model")
    config = config_of("qwen2_5_vl", tmp_path, model, export={"dtype": BF16})
    out = Path(run_ranks(export, 1, config, 0, timeout=120)[0])
    assert {value.dtype for value in tensors(out).values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == BF16
