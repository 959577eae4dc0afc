"""Every family of HF multimodal models, under any layout, equals HF's own class on the unpacked samples.

Bounds, fp32: losses and norms 1e-5 relative, weights after three steps 1e-5 absolute.
"""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, family_config, make_model, rows_of, towers_of
from parity.model_reference import train_hf_model
from ranks import run_ranks
from tiny import merged, write_config
from worker import merge_weights, train_and_collect

STEPS = 3
LAYOUTS = {
    "1": (1, ()),
    "pp2": (2, ("pipeline.stages=2",)),
    "pp4": (4, ("pipeline.stages=4",)),
    "dp2": (2, ()),
    "tp2": (2, ("tensor_parallel.autotp_size=2",)),
    "sp2": (2, ("sequence_parallel_size=2",)),
    "pp2tp2": (4, ("pipeline.stages=2", "tensor_parallel.autotp_size=2")),
    "pp2sp2": (4, ("pipeline.stages=2", "sequence_parallel_size=2")),
    "recompute": (2, ("pipeline.stages=2", "pipeline.activation_checkpoint_interval=1")),
    "encoders_recompute": (1, ("omni.encoder_parallel.recompute=true",)),
    "blocks": (2, ("pipeline.stages=2", "pipeline.activation_checkpoint_interval=2")),
    "first_stage": (2, ("pipeline.stages=2", "omni.encoder_parallel.placement=first_stage")),
    "gangs": (2, ("omni.encoder_parallel.long_short=8",)),  # media of more tokens are shared
    "whole": (2, ("omni.encoder_parallel.long_short=off",)),  # videos are not dealt by their frames
    "zero3": (2, ("zero_optimization.stage=3", "omni.encoder_parallel.zero_stage=3")),
}
EXPERT_LAYOUTS = {
    "ep2": (2, ("expert_parallel.enabled=true", "expert_parallel.autoep_size=2")),
    "pp2ep2": (4, ("pipeline.stages=2", "expert_parallel.enabled=true", "expert_parallel.autoep_size=2")),
}
FAST = [(name, layout) for name, family in FAMILIES.items() for layout in family.layouts]
FULL = [
    (name, layout)
    for name, family in FAMILIES.items()
    for layout in (LAYOUTS | EXPERT_LAYOUTS if family.experts else LAYOUTS)
    if layout not in (*family.layouts, *family.never)
]
EXPERTS = [name for name, family in FAMILIES.items() if family.experts]


FROZEN: dict[str, dict[str, Any]] = {
    "tower": {"encoders": {"vision": {"freeze": True}}},
    "vision": {"encoders": {"vision": {"freeze": True, "projector": {"freeze": True}}}},
    "llm": {"llm": {"freeze": True}},
}


@functools.cache
def made(family: str, tied: bool = False, frozen: str = "", router: bool = False) -> tuple[Path, Path, Path]:
    """(checkpoint, rows, configuration) of a tiny model. router: with a coefficient of its loss."""
    folder = Path(tempfile.mkdtemp(prefix=f"{family}-"))
    model, rows = make_model(family, folder / "model", tied=tied), rows_of(family, folder / "rows")
    if router:
        config = json.loads((model / "config.json").read_text())
        inside = config.get("thinker_config", config)
        inside["text_config"] |= {"output_router_logits": True, "router_aux_loss_coef": 0.5}
        (model / "config.json").write_text(json.dumps(config))
    raw = family_config(family, model, rows, folder / "run")
    raw["omni"] = merged(raw["omni"], FROZEN.get(frozen, {}))
    return model, rows, write_config(raw, folder / "config.json")


@functools.cache
def reference(family: str, *variant: Any) -> dict[str, Any]:
    """The plain loop in a child, so that this process can still fork."""
    return run_ranks(_reference, 1, *map(str, made(family, *variant)), timeout=120)[0]


def _reference(model: str, rows: str, config_path: str) -> dict[str, Any]:
    from models.multimodal import read_model
    from omni_ds.config.load import load_config
    from omni_ds.engine.launch import assemble

    run = assemble(load_config(config_path))
    result = train_hf_model(run.config, run.dataset, run.sampler, Path(model), Path(rows), STEPS)
    checkpoint = read_model(run.config.omni.model)
    names = [h.name for h in [*run.runtime.module.held(), *run.runtime.encoder_parameters()]]
    result["names"] = {name: checkpoint.class_name(name) for name in names}
    return result


def check(family: str, layout: str, tied: bool = False, frozen: str = "", router: bool = False) -> None:
    world, overrides = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    config = str(made(family, tied, frozen, router)[2])
    results = run_ranks(train_and_collect, world, config, overrides, timeout=180)
    expected = reference(family, tied, frozen, router)
    if layout == "gangs":
        assert results[0][FAMILIES[family].long] > 0
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5), result["rank"]
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5), result["rank"]
    final = merge_weights(results, "final")
    assert final.keys() == expected["names"].keys()
    differences = {
        name: (final[name] - expected["final"][expected["names"][name]]).abs().max().item() for name in final
    }
    worst = max(differences, key=differences.get)
    assert differences[worst] < 1e-5, (worst, differences[worst])


@pytest.mark.parametrize(("family", "layout"), FAST)
def test_a_family_equals_hf(family: str, layout: str) -> None:
    check(family, layout)


@pytest.mark.full
@pytest.mark.parametrize(("family", "layout"), FULL)
def test_a_family_equals_hf_in_every_layout(family: str, layout: str) -> None:
    check(family, layout)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_gradient_equals_hf(family: str) -> None:
    """One step of plain gradient descent leaves the gradient as the difference of the weights; its rate is so
    high that the weights' own rounding (2e-9 of 0.05) does not show even where no gradient is above 1e-8, as
    in a convolution under a deep tower. Bound: 1e-5 of a parameter's largest element. The gradient of a key
    bias is zero up to rounding: bound by the largest of all."""
    rate = 2.0**24
    overrides = (
        "optimizer.type=SGD",
        f'optimizer.params={{"lr": {rate}}}',
        "gradient_clipping=0.0",
        *(f"omni.encoders.{tower}.lr={rate}" for tower in towers_of(family)),
        *(f"omni.encoders.{tower}.projector.lr={rate}" for tower in towers_of(family)),
    )
    (result,) = run_ranks(train_and_collect, 1, str(made(family)[2]), overrides, 1, timeout=120)
    expected = reference(family)
    largest = max(gradient.abs().max().item() for gradient in expected["gradients"].values())
    compared = 0
    for name, local in expected["names"].items():
        ours = (result["initial"][name] - result["final"][name]) / rate
        theirs = expected["gradients"].get(local, torch.zeros_like(ours))
        difference, scale = (ours - theirs).abs().max().item(), theirs.abs().max().item()
        if name.endswith("k_proj.bias"):
            scale = largest
        assert difference <= 1e-5 * scale, (name, difference, scale)
        compared += local in expected["gradients"]
    assert compared == len(expected["gradients"])


@pytest.mark.full
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize(("family", "layout"), [("qwen2_5_vl", "pp2"), ("qwen3_vl", "pp2tp2")])
def test_frozen_parts_equal_hf(family: str, layout: str, frozen: str) -> None:
    check(family, layout, frozen=frozen)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_model_equals_hf(family: str) -> None:
    check(family, "pp2", tied=True)


@pytest.mark.parametrize(
    "family", [EXPERTS[0], *(pytest.param(f, marks=pytest.mark.full) for f in EXPERTS[1:])]
)
def test_router_losses_are_those_of_our_definition(family: str) -> None:
    """HF's function for each document and layer, weighted by tokens; HF's own is over the whole batch."""
    check(family, "pp2ep2", router=True)
    plain, taught = reference(family, False, "", False), reference(family, False, "", True)
    assert taught["norms"][0] != pytest.approx(plain["norms"][0], rel=1e-3)
