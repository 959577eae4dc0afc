"""plan.json: planned steps as data, with the simulated time of every action."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_ds.plan.plan import Plan, ReplicaPlan, StepPlan
from omni_ds.plan.predict import predict
from omni_ds.plan.simulate import Simulation

VERSION = 1


@dataclass(frozen=True)
class Planned:
    """A step plan with the simulation of it (times in FLOPs, messages take no time)."""

    step: StepPlan
    simulation: Simulation

    @classmethod
    def of(cls, plan: Plan, step: StepPlan) -> Planned:
        return cls(step, predict(plan, step))


def plan_record(plan: Plan, steps: Mapping[str, Planned]) -> dict[str, Any]:
    """Everything about the planned steps, by name of the mix, in plain JSON types.

    ranks[r].actions: [printed action, start, end] in program order; `Action.parse` reads them. Times are
    FLOPs, as the schedule was made: a rank computes one after another, messages and the end of the step take
    no time. windows[w].shares: for each rank the (row, ordinal) of its items. transfers[].pieces:
    [micro-batch, first row in the source's window output, first packed token, rows].
    """
    mesh = plan.mesh
    return {
        "version": VERSION,
        "time_unit": "FLOP",
        "mesh": {
            "pipe": mesh.pipe,
            "data": mesh.data,
            "sequence": mesh.sequence,
            "tensor": mesh.tensor,
        },
        "placement": plan.options.placement,
        "stages": [list(layers) for layers in plan.stages],
        "encoders": [meta.name for meta in plan.encoders],
        "steps": {name: _step(plan, planned) for name, planned in steps.items()},
    }


def write_plan(plan: Plan, steps: Mapping[str, Planned], path: Path) -> None:
    """Write :func:`plan_record`; OSError when the file cannot be written."""
    path.write_text(json.dumps(plan_record(plan, steps)) + "\n")


def _step(plan: Plan, planned: Planned) -> dict[str, Any]:
    step, simulation = planned.step, planned.simulation
    return {
        "hash": f"{step.hash:016x}",
        "samples": step.samples,
        "tokens": step.tokens,
        "target_tokens": step.target_tokens,
        "length": simulation.length,
        "bubble_fraction": simulation.bubble_fraction,
        "encoder_imbalance": step.encoder_imbalance,
        "llm_imbalance": step.llm_imbalance,
        "encoder_imbalance_given": step.encoder_imbalance_given,
        "llm_imbalance_given": step.llm_imbalance_given,
        "long_items": step.long_items,
        "ranks": [
            {
                "rank": rank,
                **plan.mesh.coords(rank)._asdict(),
                "idle": dict(simulation.idle[rank]),
                "peak_micro_batches": simulation.peak_micro_batches[rank],
                "peak_windows": simulation.peak_windows[rank],
                "actions": [[str(action), start, end] for action, start, end in simulation.spans[rank]],
            }
            for rank in range(plan.mesh.world_size)
        ],
        "replicas": [_replica(replica) for replica in step.replicas],
    }


def _replica(replica: ReplicaPlan) -> dict[str, Any]:
    return {
        "ranks": list(replica.ranks),
        "live_windows": replica.live,
        "micro_batches": [
            {
                "tokens": micro_batch.tokens,
                "target_tokens": micro_batch.target_tokens,
                "rows": [sample.row for sample in micro_batch.samples],
            }
            for micro_batch in replica.micro_batches
        ],
        "windows": [
            {
                "micro_batches": list(window.micro_batches),
                "shares": {
                    str(share.rank): [[placed.item.row, placed.item.ordinal] for placed in share.items]
                    for share in window.shares
                },
            }
            for window in replica.windows
        ],
        "transfers": [
            {
                "window": transfer.window,
                "source": transfer.source,
                "destination": transfer.destination,
                "rows": transfer.rows,
                "pieces": [
                    [piece.micro_batch, piece.source_start, piece.destination_start, piece.rows]
                    for piece in transfer.pieces
                ],
            }
            for transfer in replica.transfers
        ],
    }
