"""A training step without the engine, to see what the engine costs."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.parts.masters import MasterAdamW
from benchmarks.parts.release import release
from omni_ds.engine.runtime import Runtime
from omni_ds.engine.step import StepInput


class HandLoop:
    """The modules of a runtime in a loop written by hand: no engine, schedule or messages; fp32 masters,
    accumulation and norm, fused AdamW. step: whose media it keeps; later steps have the same.

    The runtime cannot train any more: its optimizers let go of the weights and of their memory.
    """

    def __init__(self, runtime: Runtime, step: StepInput):
        self.llm, self.encoders = runtime.module, runtime.encoders.encoders()
        modules = [self.llm, *self.encoders.values()]
        release(runtime)
        self.optimizer = MasterAdamW(p for module in modules for p in module.parameters())
        self.media = {}  # by sample; they lie by window and encoder in the step
        for window in step.plan.replicas[0].windows:
            found = {name: iter(values) for name, values in step.media.get(window.index, {}).items()}
            for placed in window.share(0).items:
                self.media[placed.item.row] = next(found[placed.item.encoder])

    def run(self, step: StepInput) -> None:
        order = {name: n for n, name in enumerate(self.encoders)}
        for mb in step.plan.replicas[0].micro_batches:
            placed = sorted(
                (
                    p
                    for w in step.plan.replicas[0].windows
                    for p in w.share(0).items
                    if p.micro_batch == mb.index
                ),
                key=lambda p: (order[p.item.encoder], p.position),
            )
            batch, values = step.batches[mb.index], {}
            for one in placed:
                values.setdefault(one.item.encoder, []).append(self.media[one.item.row])
            if placed:
                rows = torch.cat(
                    [self.encoders[name](values[name]) for name in self.encoders if name in values]
                )
                at = torch.cat(
                    [
                        torch.arange(p.position + o, p.position + o + k)
                        for p in placed
                        for o, k in p.item.spans
                    ]
                )
                batch = replace(batch, feature_positions=at.to(rows.device), features=rows)
            losses, _ = self.llm(batch, None)
            (losses.sum() / step.target_tokens).backward()
            self.optimizer.accumulate()
        self.optimizer.step()
