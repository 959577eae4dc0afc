"""A packed micro-batch on the device, and the state that flows through the layers of a pipeline stage.

Whole samples lie one after another in one sequence of T tokens; attention stays inside each.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from models.documents import Documents
from models.masks import Packing
from omni_ds.parallel.ulysses import Ulysses


@dataclass
class PackedBatch:
    """One micro-batch, or this rank's shard of one: then T, N and R count what the shard holds, and the
    segments stay those of the whole sequence.

    T tokens, n samples, N targets, R feature rows, H hidden size of the LLM, D levels of a row (deepstack).

    - input_ids: [T] int64; position_ids: [T] int64, positions restart at 0 with each sample, or [k, T] where
      a model has k kinds of position.
    - cu_seqlens: [n + 1] int32 on the device, starts with 0; segments: the n lengths on the host.
    - target_positions, target_ids: [N] int64; the logits at token position t predict target_ids, already
      shifted.
    - sample_of_target: [N] int64, which of the n samples a target belongs to.
    - feature_positions: [R] int64, the token a feature row replaces; features: [R, H * (1 + D)], the row and
      its levels. None without media; only the first stage has the features.
    - placeholder_positions: [P] int64, all placeholder tokens, of which ``feature_positions`` are the rows
      this rank has; None: the same.
    - bounds: where each shard of the whole sequence starts, and the end; None: this is the whole sequence.
    - padding: dummy tokens at the end of the whole sequence, a segment of their own after the samples.
    - lost: segments of the whole sequence whose sample counts for nothing, because its media failed.
    - spans: (offset, length) in the whole sequence of tokens that see each other in both directions
      (MaskSpec.spans).
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    segments: tuple[int, ...]
    target_positions: Tensor
    target_ids: Tensor
    sample_of_target: Tensor
    feature_positions: Tensor | None = None
    features: Tensor | None = None
    placeholder_positions: Tensor | None = None
    bounds: tuple[int, ...] | None = None
    padding: int = 0
    lost: tuple[int, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    _documents: Documents | None = field(default=None, init=False, repr=False, compare=False)

    def documents(self, sequence: ProcessGroup | None) -> Documents:
        """Which sample each token here is of, found once. sequence: the ranks that hold the other shards."""
        if self._documents is None:
            self._documents = Documents.of(self, sequence)
        return self._documents

    @property
    def tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def media_positions(self) -> Tensor | None:
        """[P] int64, all tokens here that features replace, whichever tensor rank has them."""
        return self.feature_positions if self.placeholder_positions is None else self.placeholder_positions

    def message_rows(self, levels: int) -> int:
        """Rows of a stage's message with this many levels left to add: T + levels * P."""
        media = self.media_positions
        return self.tokens + (levels * media.shape[0] if levels and media is not None else 0)

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch on another device (non-blocking: pinned host tensors copy asynchronously)."""
        moved = {
            each.name: value.to(device, non_blocking=True)
            for each in fields(self)
            if isinstance(value := getattr(self, each.name), Tensor)
        }
        return replace(self, **moved)


def pad(batch: PackedBatch, count: int) -> PackedBatch:
    """A whole batch with ``count`` dummy tokens (id 0, positions 0, 1, ...) at the end, as one more segment.

    They have no targets. A count of 0 adds no segment.
    """
    assert batch.bounds is None and batch.padding == 0, "only a whole batch can be padded, and once"
    if count == 0:
        return batch
    ids, positions, offsets = batch.input_ids, batch.position_ids, batch.cu_seqlens
    steps = torch.arange(count, dtype=positions.dtype, device=positions.device)
    return replace(
        batch,
        input_ids=torch.cat([ids, ids.new_zeros(count)]),
        position_ids=torch.cat([positions, steps.expand(*positions.shape[:-1], count)], dim=-1),
        cu_seqlens=torch.cat([offsets, offsets[-1:] + count]),
        max_seqlen=max(batch.max_seqlen, count),
        segments=(*batch.segments, count),
        padding=count,
    )


def shard(batch: PackedBatch, bounds: tuple[int, ...], index: int) -> PackedBatch:
    """Tokens ``bounds[index]`` to ``bounds[index + 1]`` of a whole batch, with the targets and feature rows
    among them.

    Positions of targets, features and placeholders become relative to the shard; ``sample_of_target`` and
    the segments stay those of the whole. A batch in one part (two bounds) is returned as it is. Best called
    on the host: on a device, it waits for the counts of selected rows.
    """
    assert batch.bounds is None, "this batch is a shard already"
    assert bounds[0] == 0 and bounds[-1] == batch.tokens == sum(batch.segments), (
        f"bounds end at {bounds[-1]} for {batch.tokens} tokens in segments of {sum(batch.segments)}"
    )
    if len(bounds) == 2:
        return batch
    first, end = bounds[index], bounds[index + 1]

    def inside(positions: Tensor) -> Tensor:
        return (positions >= first) & (positions < end)

    def relative(positions: Tensor | None) -> Tensor | None:
        return None if positions is None else positions[inside(positions)] - first

    targets, features = inside(batch.target_positions), batch.features
    if features is not None:
        features = features[inside(batch.feature_positions)]
    return replace(
        batch,
        input_ids=batch.input_ids[first:end],
        position_ids=batch.position_ids[..., first:end],
        target_positions=relative(batch.target_positions),
        target_ids=batch.target_ids[targets],
        sample_of_target=batch.sample_of_target[targets],
        feature_positions=relative(batch.feature_positions),
        features=features,
        placeholder_positions=relative(batch.placeholder_positions),
        bounds=bounds,
    )


@dataclass
class StageState:
    """What every layer takes and returns: the batch and the hidden states [T, H] (None before the embedding).

    ``levels``: [D, P, H], what is still to be added at the P ``media_positions``, the first of them behind
    the next decoder layer; None: nothing. ``rotary`` (cos, sin), each [1, T, head size], and ``packing`` are
    made by the first layer that needs them on a stage and handed on to the others; ``rotary`` by the type of
    the layer, or under None where all turn alike. ``auxiliary``: fp32 scalar, what the routers of this stage
    add to the loss, not divided by the tokens of the global batch; None without experts. ``router_counts``:
    [E] int64 for each MoE layer of this stage in training, choices of its experts.
    """

    batch: PackedBatch
    hidden: Tensor | None = None
    rotary: dict[str | None, tuple[Tensor, Tensor]] = field(default_factory=dict)
    auxiliary: Tensor | None = None
    router_counts: tuple[Tensor, ...] = ()
    levels: Tensor | None = None
    _packing: Packing | None = None

    @classmethod
    def received(cls, batch: PackedBatch, message: Tensor) -> StageState:
        """From what the stage before sent (:meth:`message`)."""
        if message.shape[0] == batch.tokens:
            return cls(batch, message)
        hidden, rest = message.split([batch.tokens, message.shape[0] - batch.tokens])
        return cls(batch, hidden, levels=rest.unflatten(0, (-1, batch.media_positions.shape[0])))

    def message(self) -> Tensor:
        """[T + D * P, H] for the next stage: hidden states, then the levels left, one after the other."""
        return self.hidden if self.levels is None else torch.cat([self.hidden, self.levels.flatten(0, 1)])

    def packing_for(self, sequence: ProcessGroup | None) -> Packing:
        """The segments to attend inside. sequence: the ranks that hold the shards; None: this rank has
        all."""
        if self._packing is None:
            batch = self.batch
            assert (sequence is None) == (batch.bounds is None), "a shard needs its group, a whole batch none"
            ulysses = None if sequence is None else Ulysses(sequence, batch.bounds)
            self._packing = Packing(batch.cu_seqlens, batch.segments, ulysses=ulysses)
        return self._packing

    def with_hidden(self, hidden: Tensor) -> StageState:
        return replace(self, hidden=hidden)

    def with_level(self) -> StageState:
        """After a decoder layer: the next level added, where one is left."""
        if self.levels is None:
            return self
        hidden = self.hidden.index_add(0, self.batch.media_positions, self.levels[0].to(self.hidden.dtype))
        return replace(self, hidden=hidden, levels=self.levels[1:] if len(self.levels) > 1 else None)

    def with_routing(self, auxiliary: Tensor | None, counts: Tensor) -> StageState:
        """After a MoE layer: its loss added, its expert counts appended."""
        if auxiliary is not None and self.auxiliary is not None:
            auxiliary = self.auxiliary + auxiliary
        return replace(
            self,
            auxiliary=self.auxiliary if auxiliary is None else auxiliary,
            router_counts=(*self.router_counts, counts),
        )
