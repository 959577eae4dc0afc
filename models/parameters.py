"""The parameters a rank holds, by global name, each with the part of the whole it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from omni_ds.plan.region import Region


@dataclass(frozen=True)
class HeldParameter:
    """``region`` of the parameter ``name``. Two of one name on a rank hold different parts of it (the halves
    of a fused projection)."""

    name: str
    parameter: nn.Parameter
    region: Region


def held_parameters(modules: Iterable[nn.Module]) -> list[HeldParameter]:
    """Parameters of modules with ``hf_names()``, in that order, a shared one once.

    A module that holds parts says so in ``regions()``: local name -> Region; all else is whole.
    """
    held, seen = [], set()
    for module in modules:
        local = dict(module.named_parameters())
        regions = module.regions() if hasattr(module, "regions") else {}
        for name, global_name in module.hf_names().items():
            parameter = local.get(name)
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            held.append(HeldParameter(global_name, parameter, regions.get(name) or Region.whole(shape)))
    return held
