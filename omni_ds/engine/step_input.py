"""From a loader's batch to what the executor runs: tensors on the device, failed samples without targets."""

from collections.abc import Collection
from dataclasses import replace

import torch

from data.loader import PackedNumpy, StepBatch
from models.packed import PackedBatch, pad, shard
from omni_ds.engine.step import StepInput
from omni_ds.plan.batch import MicroBatch
from omni_ds.plan.mesh import Coords
from omni_ds.plan.shards import even_bounds


def prepare(
    batch: StepBatch,
    rank: int,
    failed_rows: Collection[int],
    device: torch.device,
    *,
    measure: bool = False,
) -> StepInput:
    """Move one step to the device.

    A sample whose media could not be decoded keeps its tokens and shapes, so that the plan holds. It loses
    its targets, its document leaves the router losses, and it leaves the counts that both are divided by:
    it changes nothing.

    Args:
        failed_rows: dataset rows that failed on any rank, agreed on by all.
        measure: take the time of every compute action.
    """
    plan = batch.step_plan
    replica = plan.replica_of(rank)
    where = plan.mesh.coords(rank)
    failed = frozenset(failed_rows)
    batches = {}
    for index, packed in batch.packed.items():
        whole = _packed(packed, replica.micro_batches[index], failed)
        bounds = replica.bounds(replica.micro_batches[index])
        batches[index] = local_batch(whole, bounds, where, replica.tensor).to(device)
    lost = [
        sample
        for each in (plan.replicas if failed else ())
        for micro_batch in each.micro_batches
        for sample in micro_batch.samples
        if sample.row in failed
    ]
    return StepInput(
        plan=plan,
        batches=batches,
        media=batch.media,
        target_tokens=plan.target_tokens - sum(sample.target_tokens for sample in lost),
        tokens=plan.tokens - sum(sample.tokens for sample in lost),
        measure=measure,
        long_media=batch.long_media,
    )


def local_batch(whole: PackedBatch, bounds: tuple[int, ...], where: Coords, tensor: int) -> PackedBatch:
    """This rank's shard of a micro-batch, with its part of the feature rows (shards.deal_rows)."""
    batch = shard(pad(whole, bounds[-1] - whole.tokens), bounds, where.sequence)
    if tensor > 1:
        placeholders = batch.feature_positions
        start, stop = even_bounds(len(placeholders), tensor)[where.tensor : where.tensor + 2]
        batch = replace(batch, placeholder_positions=placeholders, feature_positions=placeholders[start:stop])
    return batch


def _packed(packed: PackedNumpy, micro_batch: MicroBatch, failed: frozenset[int]) -> PackedBatch:
    tensors = {
        name: torch.as_tensor(getattr(packed, name))
        for name in (
            "input_ids",
            "position_ids",
            "cu_seqlens",
            "target_positions",
            "target_ids",
            "sample_of_target",
            "feature_positions",
        )
    }
    batch = PackedBatch(
        max_seqlen=micro_batch.max_seqlen, segments=micro_batch.lengths, spans=packed.spans, **tensors
    )
    lost = [i for i, sample in enumerate(micro_batch.samples) if sample.row in failed]
    if not lost:
        return batch
    kept = ~torch.isin(batch.sample_of_target, torch.tensor(lost))
    return replace(
        batch,
        target_positions=batch.target_positions[kept],
        target_ids=batch.target_ids[kept],
        sample_of_target=batch.sample_of_target[kept],
        lost=tuple(lost),
    )
