"""The optimizer: which class, with which arguments, for the engine to build."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from omni_ds.config.nearest import did_you_mean

if TYPE_CHECKING:
    from omni_ds.config.deepspeed import Optimizer
    from omni_ds.config.root import Config

# What "auto" stands for: the defaults of HF's TrainingArguments for weight_decay, betas and eps.
_AUTO = {"lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0}

_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad", "adam_w_mode", "torch_adam")
_DEEPSPEED_ADAM = ("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "adam_w_mode")
_TORCH = {
    "AdamW": _ADAM,
    "Adam": _ADAM,
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
}
_BY_DEEPSPEED = {
    "FusedAdam": _DEEPSPEED_ADAM,
    "CPUAdam": (*_DEEPSPEED_ADAM, "fp32_optimizer_states"),
    "Lamb": (
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "bias_correction",
        "max_coeff",
        "min_coeff",
        "eps_inside_sqrt",
    ),
    "Lion": ("lr", "betas", "weight_decay"),
    "Adagrad": ("lr", "eps", "weight_decay"),
}
_KNOWN = _TORCH | _BY_DEEPSPEED
_BY_LOWER = {name.lower(): name for name in _KNOWN} | {"deepspeedcpuadam": "CPUAdam", "fusedlamb": "Lamb"}
_NAMES_ELSEWHERE = {"adamw_torch": "AdamW", "adamw_torch_fused": "AdamW", "adamw_hf": "AdamW"}


def optimizer_faults(optimizer: Optimizer) -> Iterator[str]:
    """Messages for an unknown type, unknown arguments, or arguments of the wrong kind."""
    name = _BY_LOWER.get(optimizer.type.lower())
    if name is None:
        elsewhere = _NAMES_ELSEWHERE.get(optimizer.type.lower())
        hint = f"use {elsewhere}" if elsewhere else did_you_mean(optimizer.type, _KNOWN)
        yield f"optimizer.type: {optimizer.type} is not known; {hint}"
        return
    for key, value in optimizer.params.items():
        where = f"optimizer.params.{key}"
        if key == "max_grad_norm":
            yield f"{where}: use the top-level key gradient_clipping"
        elif key not in _KNOWN[name]:
            yield f"{where}: {name} has no such argument; {did_you_mean(key, _KNOWN[name])}"
        elif value == "auto" and key not in _AUTO:
            yield f"{where}: auto is not possible here; give a value or remove it"
        elif value != "auto":
            yield from _value_fault(where, key, value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _value_fault(where: str, key: str, value: Any) -> Iterator[str]:
    if key == "betas":
        if not (isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value))):
            yield f"{where}: got {value!r}, expected two numbers, for example [0.9, 0.95]"
        elif not all(0 <= beta < 1 for beta in value):
            yield f"{where}: got {value!r}, expected both at least 0 and below 1"
    elif key in ("lr", "eps", "weight_decay", "momentum", "dampening", "max_coeff", "min_coeff"):
        if not _is_number(value) or not 0 <= value < float("inf"):
            yield f"{where}: got {value!r}, expected a number >= 0"
    elif not isinstance(value, bool):
        yield f"{where}: got {value!r}, expected true or false"


def base_lr(config: Config) -> float:
    """Learning rate of every part that has none of its own."""
    value = config.optimizer.params.get("lr", "auto")
    return float(_AUTO["lr"] if value == "auto" else value)


def optimizer_spec(config: Config) -> dict[str, Any]:
    """What the engine builds: `{"type", "params", "by_deepspeed"}`.

    `type` is a class of `torch.optim` (AdamW, Adam, SGD; whether fused is the engine's choice) when
    `by_deepspeed` is False, else FusedAdam, CPUAdam, Lamb, Lion or Adagrad, which the user asked for by name.
    `params` are its keyword arguments without "auto"; `lr` is that of parts without their own.
    DeepSpeed's rule is kept that "Adam" means AdamW unless `adam_w_mode` is false.
    """
    name = _BY_LOWER[config.optimizer.type.lower()]
    params = {key: _AUTO[key] if value == "auto" else value for key, value in config.optimizer.params.items()}
    params["lr"] = base_lr(config)
    if "weight_decay" in _KNOWN[name]:
        params.setdefault("weight_decay", _AUTO["weight_decay"])  # torch's AdamW would say 0.01
    if "betas" in params:
        params["betas"] = tuple(float(beta) for beta in params["betas"])
    by_deepspeed = name in _BY_DEEPSPEED
    if not by_deepspeed:
        params.pop("torch_adam", None)
        adam_w_mode = params.pop("adam_w_mode", True)
        if name == "Adam" and adam_w_mode:
            name = "AdamW"
    return {"type": name, "params": params, "by_deepspeed": by_deepspeed}
