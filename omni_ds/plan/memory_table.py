"""Predicted memory as text."""

from __future__ import annotations

from omni_ds.plan.activations import Load
from omni_ds.plan.hardware import GIB
from omni_ds.plan.memory import Numerics, encoder_parameters, largest, rank_memory, stage_parameters
from omni_ds.plan.plan import Plan


def memory_table(plan: Plan, load: Load, numerics: Numerics) -> str:
    """Parameters and GiB of a rank of each stage."""
    precision = "bf16" if numerics.bf16 else "fp32"
    lines = [
        f"Memory of a rank in {precision}, ZeRO-{plan.options.llm_zero_stage}: parameters and predicted GiB;",
        "the peak is in forward and backward passes, the reduction of gradients or the optimizer's step",
        f"  {'stage':>5}  {'LLM':>15}  {'encoders':>15}  {'weights':>8}  {'gradients':>9}  {'optimizer':>9}  "
        f"{'activations':>11}  {'peak':>8}" + ("  on the host" if _offloads(numerics) else ""),
    ]
    for s in range(plan.mesh.pipe):
        memory = rank_memory(plan, s, load, numerics)
        activations = memory.activations.saved + memory.activations.working
        gib = [memory.weights, memory.gradients, memory.optimizer, activations, memory.peak]
        cells = [f"{size / GIB:>{width}.3f}" for size, width in zip(gib, (8, 9, 9, 11, 8), strict=True)]
        lines.append(
            f"  {s:>5}  {stage_parameters(plan, s):>15,}  {sum(encoder_parameters(plan, s)):>15,}  "
            + "  ".join(cells)
            + (f"  {memory.host / GIB:>11.3f}" if _offloads(numerics) else "")
        )
    return "\n".join(lines)


def _offloads(numerics: Numerics) -> bool:
    return numerics.offload_optimizer or numerics.offload_param


def memory_line(plan: Plan, numerics: Numerics) -> str:
    """Most that a rank needs when a micro-batch is as large as the token budget allows, half of it targets,
    media left out: nothing is known of the data yet."""
    budget = plan.options.max_tokens_per_micro_batch
    memory = largest(plan, Load(4 * plan.mesh.pipe, budget, budget // 2), numerics)
    return (
        f"predicted memory a rank: up to {memory.peak / GIB:.2f} GiB ({memory.resident / GIB:.2f} of "
        f"weights, gradients and optimizer state) for micro-batches of {budget} tokens, media left out"
    )
