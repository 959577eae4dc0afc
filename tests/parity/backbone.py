"""The matrix of LLM layouts: every row is one way to split one model, and must equal one process."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from parity.reference import train_reference
from ranks import run_ranks
from tiny import config_dict, make_checkpoints, write_config
from worker import merge_weights, train_and_collect

STEPS = 3
AXES = {
    "pp": "pipeline.stages",
    "tp": "tensor_parallel.autotp_size",
    "sp": "sequence_parallel_size",
    "ep": "expert_parallel.autoep_size",
    "zero": "zero_optimization.stage",
}


@dataclass(frozen=True)
class Row:
    """degrees such as ``pp2tp2`` (``dp2`` only adds ranks); llm: a name of ``tiny.LLMS``."""

    degrees: str
    llm: str = "dense"
    zero: int = 1
    tied: bool = False
    more: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = [self.degrees, self.llm, f"zero{self.zero}", "tied" if self.tied else "", *self.more]
        return " ".join(word for word in words if word)

    @property
    def parsed(self) -> dict[str, int]:
        """Degree by axis."""
        return {self.degrees[i : i + 2]: int(self.degrees[i + 2]) for i in range(0, len(self.degrees), 3)}

    @property
    def world(self) -> int:
        found = self.parsed
        ranks = found.get("pp", 1) * found.get("tp", 1)
        data = found.get("dp", 1) * found.get("sp", 1)
        return ranks * max(data, found.get("ep", 1))

    @property
    def overrides(self) -> tuple[str, ...]:
        degrees = {axis: degree for axis, degree in self.parsed.items() if axis != "dp"} | {"zero": self.zero}
        return (*(f"{AXES[axis]}={degree}" for axis, degree in degrees.items()), *self.more)


@dataclass(frozen=True)
class Difference:
    """Largest relative difference of losses and norms over the steps, and absolute one of the final
    weights."""

    loss: float
    norm: float
    weight: float
    where: str


@functools.cache
def folder(llm: str, tied: bool) -> Path:
    path = Path(tempfile.mkdtemp(prefix="backbone-"))
    make_checkpoints(path, tied=tied, llm=llm)
    return path


@functools.cache
def config_path(llm: str, tied: bool) -> Path:
    checkpoints = folder(llm, tied)
    data = {"max_length": 128, "max_tokens_per_micro_batch": 128}
    raw = config_dict(checkpoints, checkpoints / "run", data=data)
    return write_config(raw, checkpoints / "config.json")


@functools.cache
def reference(llm: str, tied: bool) -> dict[str, Any]:
    """The plain loop on one process; in a child, so that this process can still fork."""
    return run_ranks(_reference, 1, str(config_path(llm, tied)), str(folder(llm, tied)), timeout=120)[0]


def _reference(config: str, checkpoints: str) -> dict[str, Any]:
    from omni_ds.config.load import load_config
    from omni_ds.engine.launch import assemble

    run = assemble(load_config(config))
    encoders = run.runtime.encoder_parameters()
    initial = {held.name: held.parameter.detach().float().clone() for held in encoders}
    return train_reference(run.config, run.dataset, run.sampler, Path(checkpoints), initial, STEPS)


def train(row: Row) -> dict[str, Any]:
    """Losses and norms of rank 0, after all ranks were found to agree, and whole weights."""
    config = str(config_path(row.llm, row.tied))
    results = run_ranks(train_and_collect, row.world, config, row.overrides, timeout=240)
    for result in results:
        for key in ("losses", "router_losses", "norms"):
            assert result[key] == results[0][key], f"rank {result['rank']}: {key}"
    return results[0] | {key: merge_weights(results, key) for key in ("initial", "final")}


def compare(row: Row) -> Difference:
    """Train a row and its reference. Raises AssertionError when nothing was trained or a weight is
    missing."""
    found, expected = train(row), reference(row.llm, row.tied)
    assert found["final"].keys() >= {n for n in expected["final"] if n.startswith("llm.")} - _tied_copy(row)
    moved = max(_apart(found["final"][n], found["initial"][n]) for n in found["final"])
    assert moved > 1e-4, "nothing was trained"
    weight, where = max((_apart(found["final"][n], expected["final"][n]), n) for n in found["final"])
    return Difference(
        loss=max(_relative(found, expected, key) for key in ("losses", "router_losses")),
        norm=_relative(found, expected, "norms"),
        weight=weight,
        where=where,
    )


def _tied_copy(row: Row) -> set[str]:
    return {"llm.lm_head.weight"} if row.tied else set()


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).abs().max())


def _relative(found: dict, expected: dict, key: str) -> float:
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found[key], expected[key], strict=True))


DENSE = (
    "pp2", "tp2", "sp2", "pp2tp2", "pp2sp2", "tp2sp2", "pp2tp2sp2", "pp4dp2", "tp4", "sp4",
)  # fmt: skip
EXPERTS = ("ep2", "ep4", "pp2ep2", "tp2ep2", "pp2tp2ep2", "sp2ep2")
RECOMPUTE = "pipeline.activation_checkpoint_interval=1"


def legal_stages(degrees: str) -> tuple[int, ...]:
    """ZeRO stages of the LLM: 2 and 3 need one pipeline stage."""
    return (0, 1) if "pp" in degrees else (0, 1, 2, 3)


# Every layout once, with ZeRO stages, models, tying and recomputation spread over them.
PAIRWISE = (
    Row("pp2", zero=0, tied=True),
    Row("tp2", "uneven", zero=1),
    Row("tp2", zero=2, tied=True),
    Row("sp2", "uneven", zero=1, more=(RECOMPUTE,)),
    Row("sp2", zero=3),
    Row("pp2tp2", zero=1, tied=True),
    Row("pp2sp2", zero=0),
    Row("tp2sp2", "uneven", zero=1, tied=True),
    Row("pp2tp2sp2", "uneven", zero=1, more=(RECOMPUTE,)),
    Row("pp4dp2", zero=1),
    Row("tp4", zero=1),
    Row("sp4", "uneven", zero=2),
    Row("ep2", "mixtral", zero=1),
    Row("ep4", "qwen3_moe", zero=1, more=(RECOMPUTE,)),
    Row("pp2ep2", "qwen3_moe", zero=1),
    Row("tp2ep2", "mixtral", zero=1),
    Row("pp2tp2ep2", "qwen3_moe", zero=1),
    Row("sp2ep2", "qwen3_moe", zero=1),
    Row("dp2", "qwen3_moe", zero=1),
)
FULL = tuple(
    Row(degrees, llm, zero, tied)
    for degrees in DENSE
    for llm in ("dense", "uneven")
    for zero in legal_stages(degrees)
    for tied in (False, True)
    if (degrees, llm) != ("tp4", "uneven")  # 3 heads on 4 ranks are refused
) + tuple(Row(degrees, llm, 1) for degrees in EXPERTS for llm in ("mixtral", "qwen3_moe"))
