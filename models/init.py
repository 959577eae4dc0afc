"""Parameters without memory until they have values, and fresh values that do not depend on the layout.

A fresh parameter is drawn from a generator seeded by (seed, global name), in fp32 and in full, whichever
rank or stage holds it; the same composition starts from the same weights on any mesh.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from omni_ds.plan.region import Region


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Modules built inside have their parameters on the meta device (buffers are real).

    ``load_module`` and ``init_module`` give each its memory and value, so a large part is never filled twice.
    """
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            module._parameters[name] = meta

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = original


def assign(module: nn.Module, name: str, value: Tensor) -> None:
    """Give a parameter its value, cast to the parameter's dtype; one on meta gets memory on the CPU."""
    owner_name, _, leaf = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    parameter = getattr(owner, leaf)
    assert parameter.shape == value.shape, f"{name}: {tuple(value.shape)} for {tuple(parameter.shape)}"
    if parameter.is_meta:
        real = value.to(device="cpu", dtype=parameter.dtype, copy=True)
        made = nn.Parameter(real, requires_grad=parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)  # DeepSpeed's flags: how to reduce it, where to count it
        setattr(owner, leaf, made)
    else:
        with torch.no_grad():
            parameter.copy_(value)


def name_seed(seed: int, name: str) -> int:
    """63-bit seed of one parameter, the same in every process."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "big") >> 1


def sinusoids(length: int, channels: int) -> Tensor:
    """Whisper's position embeddings [length, channels]: sines then cosines, timescales 1 to 10000."""
    scales = torch.exp(-math.log(10000) / (channels // 2 - 1) * torch.arange(channels // 2))
    angles = torch.arange(length).unsqueeze(1) * scales
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def init_module(
    module: nn.Module,
    names: Mapping[str, str],
    seed: int,
    std: float | None = None,
    *,
    only: Iterable[str] | None = None,
) -> None:
    """Fresh values for the parameters in ``names`` (local -> global), or for the local names in ``only``.

    Norm weights are 1, biases 0, what the module's ``constants()`` lists is constant (layer scales,
    sinusoids). All else is normal with ``std`` (an LLM's ``initializer_range``); None: 1 / sqrt(fan-in),
    which small encoders learn faster from. The padding row of an embedding is 0, as in HF. A part (the
    module's ``regions()``) is cut out of the whole.
    """
    regions: Mapping[str, Region] = module.regions() if hasattr(module, "regions") else {}
    constants: Mapping[str, Tensor] = module.constants() if hasattr(module, "constants") else {}
    for name in names if only is None else only:
        owner_name, _, leaf = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        shape = getattr(owner, leaf).shape
        region = regions.get(name) or Region.whole(tuple(shape))
        if name in constants:
            value = constants[name][region.index]
        elif "Norm" in type(owner).__name__:
            value = torch.zeros(shape) if leaf == "bias" else torch.ones(shape)
        elif leaf == "bias":
            value = torch.zeros(shape)
        else:
            convolution = isinstance(owner, nn.Linear | nn.Conv1d | nn.Conv2d)
            fan_in = math.prod(region.shape[1:]) if convolution else region.shape[-1]
            generator = torch.Generator().manual_seed(name_seed(seed, names[name]))
            value = torch.empty(region.shape).normal_(0.0, std or fan_in**-0.5, generator=generator)
            value = value[region.index]
            if isinstance(owner, nn.Embedding) and owner.padding_idx is not None:
                value[owner.padding_idx] = 0.0
        assign(module, name, value)
