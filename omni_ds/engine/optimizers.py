"""Optimizers with one parameter group per part, and schedules that respect each group's learning rate."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from deepspeed.runtime import lr_schedules
from deepspeed.utils import logger
from torch import nn

from omni_ds.config import Config, base_lr, optimizer_spec, scheduler_params
from omni_ds.parallel.expert import part_name, split_expert_groups


@dataclass(frozen=True)
class PartParameters:
    """The parameters of one part (``llm``, ``vision``, ``vision.projector``) with its learning rate."""

    name: str
    lr: float
    parameters: tuple[nn.Parameter, ...]

    def groups(self, weight_decay: float) -> Iterable[dict]:
        """Optimizer groups: matrices decay, norms and biases (fewer than two dimensions) do not."""
        matrices = [p for p in self.parameters if p.requires_grad and _shape(p) >= 2]
        vectors = [p for p in self.parameters if p.requires_grad and _shape(p) < 2]
        for parameters, decay, suffix in ((matrices, weight_decay, ""), (vectors, 0.0, " (no decay)")):
            if parameters:
                yield {"params": parameters, "lr": self.lr, "weight_decay": decay, "name": self.name + suffix}


def _shape(parameter: nn.Parameter) -> int:
    return len(getattr(parameter, "ds_shape", parameter.shape))


def part_lr(config: Config, lr: float | None) -> float:
    """A part's learning rate: its own, else the optimizer's."""
    return base_lr(config) if lr is None else lr


def build_optimizer(
    config: Config, parts: Sequence[PartParameters], device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer the config names, with two groups (decay, no decay) for each part.

    torch's own AdamW, fused on CUDA, unless the user names one of DeepSpeed's: those build a kernel first.
    """
    spec = optimizer_spec(config)
    params = dict(spec["params"])
    decay = params.pop("weight_decay", 0.0)
    groups = split_expert_groups(group for part in parts for group in part.groups(decay))
    assert groups, "an optimizer needs something to train"
    if spec["by_deepspeed"]:
        return _deepspeed_optimizer(spec["type"], groups, params)
    fused = {"fused": True} if device.type == "cuda" and spec["type"] in ("AdamW", "Adam") else {}
    return getattr(torch.optim, spec["type"])(groups, weight_decay=decay, **params, **fused)


def _deepspeed_optimizer(name: str, groups: list[dict], params: dict) -> torch.optim.Optimizer:
    from deepspeed.ops import adagrad, adam, lamb, lion  # each compiles its kernel when constructed

    classes = {
        "FusedAdam": adam.FusedAdam,
        "CPUAdam": adam.DeepSpeedCPUAdam,
        "Lamb": lamb.FusedLamb,
        "Lion": lion.FusedLion,
        "Adagrad": adagrad.DeepSpeedCPUAdagrad,
    }
    return classes[name](groups, **params)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """DeepSpeed's schedules warn of their own construction ("before it has started") on every rank."""
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class Schedules:
    """The learning rate schedules of both engines, stepped together.

    Args:
        config: resolved configuration.
        optimizers: the torch optimizers inside the engines.
    """

    def __init__(self, config: Config, optimizers: Sequence[torch.optim.Optimizer]):
        self._optimizers = list(optimizers)
        self._schedulers = []
        if config.scheduler is not None:
            scheduler_class = getattr(lr_schedules, config.scheduler.type)
            with _without_warnings():
                for optimizer in self._optimizers:
                    params = scheduler_params(config, [group["lr"] for group in optimizer.param_groups])
                    self._schedulers.append(scheduler_class(optimizer, **params))

    def step(self) -> None:
        """Advance after an optimizer step that was applied."""
        for scheduler in self._schedulers:
            scheduler.step()

    def learning_rates(self) -> dict[str, float]:
        """Current rate of every part on this rank, by part name."""
        rates: dict[str, float] = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                rates.setdefault(part_name(group).removesuffix(" (no decay)"), float(group["lr"]))
        return rates

    def state_dict(self) -> list[dict]:
        return [scheduler.state_dict() for scheduler in self._schedulers]

    def load_state_dict(self, states: Sequence[dict]) -> None:
        # A rank without encoders (placement first_stage) has the LLM's schedule only, which comes first.
        for scheduler, state in zip(self._schedulers, states, strict=False):
            scheduler.load_state_dict(state)
            if hasattr(scheduler, "get_lr"):
                rates = scheduler.get_lr()
                for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate
            if getattr(scheduler, "cycle_momentum", False):  # OneCycle drives the betas as well
                for group, betas in zip(scheduler.optimizer.param_groups, scheduler.get_mom(), strict=True):
                    group["betas"] = betas
