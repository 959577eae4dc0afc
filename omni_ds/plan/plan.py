"""What is planned: Plan (once for a run) and StepPlan (one global batch), as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from omni_ds.plan.actions import Action
from omni_ds.plan.batch import MicroBatch
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.fill import Schedule
from omni_ds.plan.gangs import largest_gang
from omni_ds.plan.llm_meta import LLMMeta
from omni_ds.plan.lower import Neighbours, Routes, add_messages, add_step_end
from omni_ds.plan.mesh import Mesh
from omni_ds.plan.reshard import Share, Transfer, Window, window_transfers
from omni_ds.plan.shards import deal_rows, sequence_bounds
from omni_ds.plan.shares import build_windows


@dataclass(frozen=True)
class PlanOptions:
    """What the config says about the plan.

    placement: "colocated" (encoders on every rank) or "first_stage". encoder_zero_stage: 1, 2 or 3.
    llm_zero_stage: 0 to 3; 0 for a frozen LLM.
    balance_mode: "auto" or "off". max_tokens_per_micro_batch: the token budget. micro_batches: fixed
    number, or None to choose the smallest that fits the budget and fills the pipeline. recompute: LLM
    layers recompute their forward in the backward; encoder_recompute: so do encoders. live_micro_batches:
    how many micro-batches' worth of encoder activations a rank may hold on average; None: as many as there
    are stages (what stage 0 holds when encoders run there), and at least 4. first_stage_work: encoder FLOPs,
    forward and backward, for each token of the LLM, counted on stage 0 when the layers are cut. fill_bubbles:
    False inserts colocated encoders at the same point of every stage instead (a baseline of benchmarks; no
    configuration says so).
    """

    placement: str = "colocated"
    encoder_zero_stage: int = 2
    llm_zero_stage: int = 1
    balance_mode: str = "auto"
    long_short: str | int = "auto"
    group_size: int | None = None
    max_sp: int = 8
    max_tokens_per_micro_batch: int = 8192
    micro_batches: int | None = None
    recompute: bool = False
    encoder_recompute: bool = False
    live_micro_batches: int | None = None
    first_stage_work: int = 0
    fill_bubbles: bool = True


@dataclass(frozen=True)
class Plan:
    """stages: decoder-layer ranges [start, stop) by pipeline stage; stage 0 also holds the embedding, the
    last one final norm and head."""

    mesh: Mesh
    llm: LLMMeta
    encoders: tuple[EncoderMeta, ...]
    options: PlanOptions
    stages: tuple[tuple[int, int], ...]

    @property
    def encoders_trainable(self) -> bool:
        return any(meta.trainable for meta in self.encoders)

    @property
    def levels(self) -> int:
        """Levels behind a feature row (EncoderMeta.levels); rows of encoders with fewer end in zeros."""
        return max((meta.levels for meta in self.encoders), default=0)

    @property
    def row_width(self) -> int:
        """Numbers of a feature row as it leaves its encoder."""
        return self.llm.hidden * (1 + self.levels)

    def levels_into(self, stage: int) -> int:
        """Levels that travel with the hidden states into a stage: level i is added behind decoder layer i."""
        return max(0, self.levels - self.stages[stage][0]) if stage else 0

    @property
    def gathers_encoders(self) -> bool:
        """Encoder passes are collectives of the world (ZeRO-3 shards the parameters); frozen encoders are
        plain."""
        return self.options.encoder_zero_stage == 3 and self.encoders_trainable

    @property
    def inserts_uniformly(self) -> bool:
        """Colocated encoder passes stand at the same point of every stage's program."""
        return self.gathers_encoders or not self.options.fill_bubbles

    @property
    def first_stage_only(self) -> bool:
        """Only the first stage's ranks hold encoders. Not with ZeRO-3: DeepSpeed's checks there are
        collectives of the world, so later stages keep their shard and take part with nothing to encode."""
        return self.options.placement == "first_stage" and self.mesh.pipe > 1 and not self.gathers_encoders

    @property
    def collective_forward(self) -> bool:
        """A micro-batch's forward is a collective of several replicas (experts, or weights sharded by
        ZeRO), so that one without samples still takes part."""
        return self.mesh.expert > 1 or (self.options.llm_zero_stage >= 2 and self.llm.trainable)

    @property
    def reorder_replicas(self) -> int:
        """DP replicas of a reorder group: samples are exchanged inside it."""
        return self.options.group_size or self.mesh.data

    @cached_property
    def largest_gang(self) -> int:
        """Ranks that may encode an image together; 1: none. Not where every pass is a collective of the world
        anyway (ZeRO-3), nor in the baseline of encoders on the first stage."""
        if self.options.long_short == "off" or self.gathers_encoders:
            return 1
        if self.options.placement != "colocated":
            return 1
        return largest_gang(self.mesh, self.reorder_replicas, self.options.max_sp)

    @property
    def encoder_order(self) -> dict[str, int]:
        return {meta.name: i for i, meta in enumerate(self.encoders)}


@dataclass(frozen=True)
class ReplicaPlan:
    """One DP replica's step. ranks: its encoder group, by stage. schedule: compute actions by stage.

    members[w], passes[w]: micro-batches and passes of a window; parts[w][r]: which of its items ranks[r]
    encodes (shares.build_windows); guests[w]: (rank, item) of slices that ranks of other replicas encode.
    live: bound on encoder windows alive on a rank. sequence, tensor: degrees; collective: forward passes are
    collectives of several replicas (Plan.collective_forward). windows, transfers and lowered actions follow
    from these and are made when asked for: a process needs those of its own replica and rank.
    """

    micro_batches: tuple[MicroBatch, ...]
    members: tuple[tuple[int, ...], ...]
    passes: tuple[tuple[str, ...], ...]
    parts: tuple[tuple[tuple[int, ...], ...], ...]
    encoders: tuple[str, ...]
    ranks: tuple[int, ...]
    schedule: Schedule
    live: int
    forward_only: bool
    tied: bool
    llm_trainable: bool
    encoders_trainable: bool
    sequence: int = 1
    tensor: int = 1
    collective: bool = False
    guests: tuple[tuple[tuple[int, int], ...], ...] = ()
    _lowered: dict[int, tuple[Action, ...]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        return build_windows(
            self.micro_batches,
            self.members,
            self.parts,
            self.passes,
            self.ranks,
            self.encoders,
            self.guests,
        )

    def bounds(self, micro_batch: MicroBatch) -> tuple[int, ...]:
        """Sequence shards of a micro-batch (shards.sequence_bounds)."""
        return sequence_bounds(micro_batch.tokens, self.sequence, self.collective)

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        lanes = self.sequence * self.tensor
        runs = {mb.index: deal_rows(spans_of(mb), self.bounds(mb), self.tensor) for mb in self.micro_batches}
        return tuple(t for window in self.windows for t in window_transfers(window, self.ranks[:lanes], runs))

    @cached_property
    def _routes(self) -> Routes:
        return Routes.of(self.windows, self.transfers)

    def rank_actions(self, rank: int, hosted: Mapping[int, Sequence[int]]) -> tuple[Action, ...]:
        """Lowered. hosted: window -> ranks of other replicas that need what this one encodes for them."""
        if rank not in self._lowered:
            self._lowered[rank] = self._lower(rank, hosted)
        return self._lowered[rank]

    def outgoing(self, rank: int) -> Mapping[int, Sequence[int]]:
        """Window -> ranks of this replica that need rows which `rank`, here or elsewhere, encodes."""
        return self._routes.outgoing.get(rank, {})

    def _lower(self, rank: int, hosted: Mapping[int, Sequence[int]]) -> tuple[Action, ...]:
        lanes = len(self.ranks) // len(self.schedule.stages)
        stage, lane = divmod(self.ranks.index(rank), lanes)
        last = len(self.schedule.stages) - 1
        neighbours = Neighbours(
            self.ranks[(stage - 1) * lanes + lane] if stage else None,
            self.ranks[(stage + 1) * lanes + lane] if stage < last else None,
        )
        gradients = self.encoders_trainable and not self.forward_only
        actions = add_messages(
            self.schedule.stages[stage], rank, neighbours, self._routes, gradients=gradients, hosted=hosted
        )
        if self.forward_only:
            return actions
        return add_step_end(
            actions,
            tied=self.tied and last > 0 and stage in (0, last),
            llm_trainable=self.llm_trainable,
            encoders_trainable=self.encoders_trainable,
            last_window=len(self.members) - 1,
        )


def spans_of(micro_batch: MicroBatch) -> list[tuple[int, int]]:
    """(token, length) of a micro-batch's placeholders by rising token."""
    return sorted(
        (position + offset, length)
        for sample, position in zip(micro_batch.samples, micro_batch.cu_seqlens, strict=False)
        for item in sample.items
        for offset, length in item.spans
    )


@dataclass(frozen=True)
class StepPlan:
    """One global batch. replicas: by data index. hash: 63 bits, equal on ranks that computed the same plan.

    encoder_imbalance: most loaded rank over mean; llm_imbalance: dearest replica over mean; both also as they
    would be without balancing (balance.as_given). bubble_fraction: idle share of the simulated step.
    long_items: share of media that are encoded in parts or slices. rooms: what the ranks of a replica should
    encode of each window (weave.Woven).
    """

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
    encoder_imbalance_given: float = 1.0
    llm_imbalance_given: float = 1.0
    long_items: float = 0.0
    rooms: Sequence[Sequence[int]] | None = None

    def replica_of(self, rank: int) -> ReplicaPlan:
        return self.replicas[self.mesh.coords(rank).data]

    @cached_property
    def _hosts(self) -> dict[int, tuple[int, ...]]:
        """Rank -> other replicas that it encodes slices for."""
        found: dict[int, set[int]] = {}
        for data, replica in enumerate(self.replicas):
            for window in replica.guests:
                for rank, _ in window:
                    found.setdefault(rank, set()).add(data)
        return {rank: tuple(sorted(replicas)) for rank, replicas in found.items()}

    def hosted(self, rank: int) -> tuple[int, ...]:
        """Other replicas that a rank encodes slices for."""
        return self._hosts.get(rank, ())

    def shares(self, rank: int, window: int) -> tuple[tuple[int, Share], ...]:
        """What a rank encodes in a window: (replica, share), its own replica's first, if empty too."""
        own = self.mesh.coords(rank).data
        found = [(own, self.replicas[own].windows[window].share(rank))]
        for data in self.hosted(rank):
            share = self.replicas[data].windows[window].find(rank)
            if share is not None:
                found.append((data, share))
        return tuple(found)

    def actions(self, rank: int) -> tuple[Action, ...]:
        hosted: dict[int, tuple[int, ...]] = {}
        for data in self.hosted(rank):
            for window, ranks in self.replicas[data].outgoing(rank).items():
                hosted[window] = (*hosted.get(window, ()), *ranks)
        return self.replica_of(rank).rank_actions(rank, hosted)
