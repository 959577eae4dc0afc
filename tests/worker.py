"""What a test's ranks run: assemble a config, train some steps, return losses, norms and whole weights."""

from typing import Any

import torch
import torch.distributed as dist


def train_and_collect(
    config_path: str, overrides: tuple[str, ...] = (), steps: int | None = None
) -> dict[str, Any]:
    """Train and return what parity tests compare.

    Returns:
        ``losses``, ``norms``: by step; ``slices``, ``parts``: of media that several ranks shared;
        ``initial``, ``final``: whole fp32 weights by global name: the encoders' and, on the first of the
        ranks that share a stage's parameters, that stage's.
    """
    from omni_ds.checkpoint.full_weights import full_parameters
    from omni_ds.config.load import load_config
    from omni_ds.engine.launch import assemble
    from omni_ds.engine.step_input import prepare
    from omni_ds.parallel.agreement import agree_on_step

    run = assemble(load_config(config_path, overrides))
    runtime = run.runtime

    def weights() -> dict[str, torch.Tensor]:
        held, shards = runtime.module.held(), runtime.groups.shards
        check_copies(held, shards)
        found = {n: t.clone().cpu() for n, t in full_parameters(held, shards)}
        with runtime.encoders.ranks.active():
            found |= {n: t.clone().cpu() for n, t in full_parameters(runtime.encoder_parameters())}
        return found

    initial, losses, router_losses, norms, plans, slices, parts = weights(), [], [], [], [], 0, 0
    last = steps if steps is not None else run.config.omni.train.max_steps
    for batch in run.batches(0, last):
        failed = agree_on_step(batch.step_plan, sorted({r for r, _ in batch.failed}), runtime.groups.control)
        result = runtime.executor.run(prepare(batch, runtime.rank, failed, runtime.device))
        losses.append(result.loss)
        router_losses.append(result.auxiliary_loss)
        norms.append(result.grad_norm)
        plans.append(batch.step_plan.micro_batches)
        slices += count_slices(batch.step_plan)
        parts += sum(item.start > 0 for item in items_of(batch.step_plan))
    return {
        "losses": losses,
        "router_losses": router_losses,
        "norms": norms,
        "initial": initial,
        "final": weights(),
        "micro_batches": plans,
        "slices": slices,
        "parts": parts,
        "rank": runtime.rank,
    }


def count_slices(step_plan: Any) -> int:
    """Slices of items that gangs encode in a step."""
    return sum(item.gang > 1 for item in items_of(step_plan))


def items_of(step_plan: Any) -> list[Any]:
    batches = [batch for replica in step_plan.replicas for batch in replica.micro_batches]
    return [item for batch in batches for sample in batch.samples for item in sample.items]


def check_copies(held: list, shards: dist.ProcessGroup) -> None:
    """Ranks of ``shards`` that hold the same part of a parameter hold equal values."""
    from omni_ds.checkpoint.full_weights import held_weights

    mine = {(h.name, h.region): tensor.cpu() for h, tensor in held_weights(held)}
    everyone: list = [None] * dist.get_world_size(shards)
    dist.all_gather_object(everyone, mine, group=shards)
    for theirs in everyone:
        differing = [
            part for part in mine.keys() & theirs.keys() if not torch.equal(mine[part], theirs[part])
        ]
        assert not differing, f"copies differ: {differing}"


def merge_weights(results: list[dict[str, Any]], key: str) -> dict[str, torch.Tensor]:
    """Whole model of all ranks; copies of one parameter must agree."""
    whole: dict[str, torch.Tensor] = {}
    for result in results:
        for name, tensor in result[key].items():
            if name in whole:
                assert torch.equal(whole[name], tensor), f"{name} differs between ranks"
            whole[name] = tensor
    return whole


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest absolute difference of two sets of weights, and where it is."""
    assert a.keys() == b.keys(), f"names differ: {sorted(a.keys() ^ b.keys())[:6]}"
    return max(((a[n].float() - b[n].float()).abs().max().item(), n) for n in a)
