"""config -> Plan (once) -> StepPlan (each step): the types, and the functions that make them."""

from __future__ import annotations

from dataclasses import dataclass

from omni_ds.plan.actions import Action
from omni_ds.plan.batch import MicroBatch
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.mesh import Mesh
from omni_ds.plan.reshard import Transfer, Window


@dataclass(frozen=True)
class PlanOptions:
    """What the config says about the plan.

    placement: "colocated" (encoders on every rank) or "first_stage". encoder_zero_stage: 1, 2 or 3.
    balance_mode: "auto" or "off". max_tokens_per_micro_batch: the token budget. micro_batches: fixed number, or
    None to choose the smallest that fits the budget and fills the pipeline. recompute: LLM layers recompute
    their forward in the backward. encoder_recompute: so do encoders.
    """

    placement: str = "colocated"
    encoder_zero_stage: int = 2
    balance_mode: str = "auto"
    max_tokens_per_micro_batch: int = 8192
    micro_batches: int | None = None
    recompute: bool = False
    encoder_recompute: bool = False


@dataclass(frozen=True)
class Plan:
    """stages: decoder-layer ranges [start, stop) by pipeline stage; stage 0 also holds the embedding, the last
    one final norm and head."""

    mesh: Mesh
    llm: object
    encoders: tuple[EncoderMeta, ...]
    options: PlanOptions
    stages: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ReplicaPlan:
    """One DP replica's step; actions: global rank -> its actions in order."""

    micro_batches: tuple[MicroBatch, ...]
    windows: tuple[Window, ...]
    transfers: tuple[Transfer, ...]
    actions: dict[int, tuple[Action, ...]]


@dataclass(frozen=True)
class StepPlan:
    """One global batch. replicas: by data index. hash: 63 bits, equal on ranks that computed the same plan."""

    mesh: Mesh
    step: int
    replicas: tuple[ReplicaPlan, ...]
    micro_batches: int
    samples: int
    tokens: int
    target_tokens: int
    forward_only: bool
    hash: int
    encoder_imbalance: float
    llm_imbalance: float
    bubble_fraction: float

    def replica_of(self, rank: int) -> ReplicaPlan:
        return self.replicas[self.mesh.coords(rank).data]

    def actions(self, rank: int) -> tuple[Action, ...]:
        return self.replica_of(rank).actions[rank]
