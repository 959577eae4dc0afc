"""Filling modules with the weights of HF checkpoints, slice by slice, or with fresh ones.

weights = [llm_weights(path, config), tower_weights(name, path, config, encoder.config)]
with empty_parameters():
    layer = definition.build()
fill_module(layer, layer.hf_names(), weights, seed, std=config.initializer_range)
check_weights(weights)   # one UserError for everything that did not fit
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from models.checkpoint_files import WeightSource
from models.decoders import find_family
from models.init import assign, empty_parameters, init_module
from models.weight_names import NameMap, map_names, summarise, top_names
from omni_ds.errors import UserError
from omni_ds.plan.region import Region

__all__ = [
    "PartWeights",
    "WeightSource",
    "check_weights",
    "empty_parameters",
    "fill_module",
    "find_weights",
    "init_module",
    "llm_weights",
    "load_module",
    "tower_weights",
]


class PartWeights:
    """Weights of one part of a composition under their global names.

    ``prefix`` + a name of the HF class ``model`` (on meta) is a global name. ``unused``: checkpoint tensors
    left out by design (text tower, decoder, layers above the feature layer). ``missing``, ``unexpected`` and
    ``misshaped`` collect what does not fit.
    """

    def __init__(
        self,
        source: WeightSource,
        prefix: str,
        model: PreTrainedModel,
        names: NameMap,
        unexpected: Callable[[str], bool],
    ):
        self.source, self.prefix, self.model = source, prefix, model
        self._recipes = names.recipes
        self.unused = tuple(name for name, renamed in names.foreign.items() if not unexpected(renamed))
        self.missing: list[str] = []
        self.unexpected = [name for name, renamed in names.foreign.items() if unexpected(renamed)]
        self.misshaped: list[str] = []
        self._made: dict[str, Tensor] = {}
        self._made_of: tuple = ()

    def local(self, name: str) -> str:
        """A global name -> the name in the HF class."""
        return name.removeprefix(self.prefix)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the whole tensor by global name, None when the checkpoint has none; reads nothing."""
        local = self.local(name)
        recipe = self._recipes.get(local)
        if recipe is None:
            return None
        if recipe.converter is None:
            return self.source.shape(recipe.sources[0][0])
        made = recipe.make(lambda source: torch.empty(self.source.shape(source), device="meta"), self.model)
        return tuple(made[local].shape) if local in made else None

    def read(self, name: str, index: Sequence[slice] | None = None) -> Tensor | None:
        """A tensor (or its part) by global name, None when the checkpoint has none.

        A conversion is read in whole, once for all tensors it makes, except that of experts only those asked
        for are.
        """
        local = self.local(name)
        recipe = self._recipes.get(local)
        if recipe is None:
            return None
        if recipe.converter is None:
            return self.source.read(recipe.sources[0][0], index)
        rows, read = None, self.source.read
        if index and index[0] != slice(None) and (recipe.stacks or recipe.keeps_rows):
            rows, index = (index[0].start, index[0].stop), (slice(None), *index[1:])
            if recipe.stacks:
                recipe = recipe.rows(*rows)
            else:
                read = partial(self.source.read, index=(slice(*rows),))
        if self._made_of != (recipe.sources, rows):
            self._made, self._made_of = recipe.make(read, self.model), (recipe.sources, rows)
        value = self._made.get(local)
        return value[tuple(index)] if value is not None and index else value

    def check(self) -> None:
        """UserError that lists everything found wrong so far."""
        problems = [
            f"{label}: {summarise(names)}"
            for label, names in (
                ("missing", self.missing),
                ("unexpected", self.unexpected),
                ("of another shape", self.misshaped),
            )
            if names
        ]
        if problems:
            raise UserError(
                f"{self.source.where}: the weights of {self.source.path} do not fit "
                f"{type(self.model).__name__}. " + "; ".join(problems) + ". Check that config and weights "
                "belong together"
            )


def llm_weights(path: str, config: PreTrainedConfig, where: str = "omni.llm.path") -> PartWeights:
    """Weights of an LLM checkpoint (causal LM or base model) under ``llm.<name in HF's CausalLM>``."""
    with torch.device("meta"):
        model = find_family(config).causal_lm(config)
    source = WeightSource(path, where)
    names = map_names(source.names(), model, shape_of=source.shape)
    return PartWeights(source, "llm.", model, names, unexpected=lambda name: True)


def tower_weights(
    name: str, path: str, config: PreTrainedConfig, built: PreTrainedConfig, where: str = ""
) -> PartWeights:
    """Weights of a tower under ``encoders.<name>.tower.<name in the HF class>``.

    ``config``: the checkpoint's tower (``load_hf_config``); ``built``: what is built of it (an encoder's
    ``config``). The checkpoint may hold the tower alone or a whole model around it; the rest, the pooling
    head and the layers above the feature layer are unused by design.
    """
    whole, model = _tower_on_meta(config), _tower_on_meta(built)
    source = WeightSource(path, where or f"omni.encoders.{name}.path")
    strip = ("model.encoder.", "encoder.") if config.model_type == "whisper" else ()
    names = map_names(source.names(), whole, strip, shape_of=source.shape)
    kept = model.state_dict().keys()
    above = {
        checkpoint_name: target
        for target, recipe in names.recipes.items()
        if target not in kept
        for checkpoint_name, _ in recipe.sources
    }
    names = NameMap(
        {target: recipe for target, recipe in names.recipes.items() if target in kept},
        {**names.foreign, **above},
    )
    whole_names, tops = whole.state_dict().keys(), top_names(whole)
    return PartWeights(
        source,
        f"encoders.{name}.tower.",
        model,
        names,
        unexpected=lambda target: target not in whole_names and target.split(".", 1)[0] in tops,
    )


def _tower_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        if config.model_type == "whisper":
            from transformers.models.whisper.modeling_whisper import WhisperEncoder

            return WhisperEncoder(config)
        return AutoModel.from_config(config)


def load_module(
    module: nn.Module,
    names: Mapping[str, str],
    weights: PartWeights,
    *,
    regions: Mapping[str, Region] | None = None,
) -> set[str]:
    """Load those parameters of ``names`` (local -> global) that ``weights`` is for; their local names.

    ``regions``: for a local name, the part of the whole that the module holds; no more is read. What is
    missing or has another shape is noted in ``weights`` and left as it is; ``check_weights`` raises.
    """
    for local, region in find_weights(module, names, weights, regions=regions).items():
        value = weights.read(names[local], None if region.is_whole else region.index)
        assign(module, local, value)
    return {local for local, name in names.items() if name.startswith(weights.prefix)}


def find_weights(
    module: nn.Module,
    names: Mapping[str, str],
    weights: PartWeights,
    *,
    regions: Mapping[str, Region] | None = None,
) -> dict[str, Region]:
    """Local names and regions of what ``load_module`` would read; reads nothing. Notes what does not fit."""
    found = {}
    for local, name in names.items():
        if not name.startswith(weights.prefix):
            continue
        region = (regions or {}).get(local) or Region.whole(tuple(module.get_parameter(local).shape))
        shape = weights.shape(name)
        if shape is None:
            weights.missing.append(name)
        elif shape != region.shape:
            weights.misshaped.append(f"{name} is {list(shape)}, the config says {list(region.shape)}")
        else:
            found[local] = region
    return found


def fill_module(
    module: nn.Module,
    names: Mapping[str, str],
    weights: Iterable[PartWeights],
    seed: int,
    std: float | None = None,
) -> None:
    """Load what the checkpoints hold of a module and draw the rest (``init_module``).

    A module that holds parts of parameters says which in ``regions()``.
    """
    taken: set[str] = set()
    regions = module.regions() if hasattr(module, "regions") else {}
    for part in weights:
        taken |= load_module(module, names, part, regions=regions)
    init_module(module, names, seed, std, only=[name for name in names if name not in taken])


def check_weights(weights: Iterable[PartWeights]) -> None:
    """Raise one UserError for everything that did not fit in any checkpoint."""
    messages = []
    for part in weights:
        try:
            part.check()
        except UserError as error:
            messages.append(str(error))
    if messages:
        raise UserError("\n".join(messages))
