"""An HF multimodal checkpoint taken apart: which of its modules are the LLM, towers and projectors, and its
tensors under our global names.

Nothing here knows a family: parts are found in the module tree of the HF class on the meta device. The
language model is what ``get_decoder`` returns; a module named ``...projector``, or the last part of a tower
(``merger``, ``proj``), is a projector, to which parameters of the base model itself belong; what else it
holds are towers, named ``audio`` or ``vision``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from models.checkpoint_files import WeightSource
from models.decoders import find_family
from models.families import FAMILIES
from models.families.base import ModelFamily
from models.hf_config import read_config
from models.weight_names import NameMap, Recipe, map_names, summarise
from models.weights import PartWeights
from omni_ds.errors import UserError

WHERE = "omni.model.path"
_MEDIA = {"vision": ("image", "video"), "audio": ("audio",)}  # a tower's main medium first
# A tower's module that projects -> the projector's place in the tower; the tower itself where it has several.
_OWN_PROJECTOR = {"deepstack_merger_list": "", "merger": ".merger", "proj": ".proj", "proj1": ""}
_TOKEN_KEYS = ("{}_token_id", "{}_token_index")


@dataclass(frozen=True)
class Tower:
    """An encoder of a checkpoint. tokens: medium -> id of the token that stands for one feature row, as far
    as config.json says."""

    name: str
    modality: str
    config: PreTrainedConfig
    tokens: Mapping[str, int]


class Multimodal:
    """A checkpoint's config and parts; weights are read when asked for.

    Attributes:
        config: of the HF class; llm_config: of its language model, with the truth about tied embeddings.
        model: the HF class on the meta device; only its names and shapes are used.
        towers: by name.
    """

    def __init__(self, path: str, family: ModelFamily, config: PreTrainedConfig):
        self.path, self.family, self.config = path, family, config
        with torch.device("meta"):
            self.model: PreTrainedModel = getattr(transformers, family.model_class)(copy.deepcopy(config))
        self.model.tie_weights()
        self.llm_config = copy.deepcopy(config.get_text_config())
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        self.llm_config.tie_word_embeddings = head.weight is embedding.weight
        find_family(self.llm_config)
        self.clock = family.clock(config) if family.clock is not None else None
        self._prefixes = {"llm.lm_head.": f"{_name_of(self.model, head)}."}
        self.towers = self._find_parts()

    def _find_parts(self) -> dict[str, Tower]:
        base, decoder = self.model.base_model, self.model.get_decoder()
        top, towers, projectors = _name_of(self.model, base), {}, {}
        loose = [name for name, _ in base.named_parameters(recurse=False)]
        head = self.model.get_output_embeddings()
        for name, module in base.named_children():
            place = f"{top}.{name}" if top else name  # models of some releases are their own base
            if module is head:
                continue
            if module is decoder or name == "language_model":
                self._prefixes["llm.model."] = f"{place}."
            elif "projector" in name:
                projectors[_kind(name)] = place
            else:
                towers[_kind(name)] = place
                own = next((part for part in _OWN_PROJECTOR if hasattr(module, part)), None)
                if own is not None:
                    projectors[_kind(name)] = place + _OWN_PROJECTOR[own]
        found = {}
        for kind, module in towers.items():
            projector = projectors[kind] if kind in projectors else projectors[None]
            if len(towers) == 1:  # parameters of the model itself work on feature rows
                self._prefixes |= {f"encoders.{kind}.projector.{name}": f"{top}.{name}" for name in loose}
            self._prefixes |= {
                f"encoders.{kind}.projector.": f"{projector}.",
                f"encoders.{kind}.tower.": f"{module}.",
            }
            config = copy.deepcopy(getattr(self.config, f"{kind}_config"))
            for key, value in self.family.towers(self.config).get(kind, {}).items():
                setattr(config, key, value)
            found[kind] = Tower(kind, _MEDIA[kind][0], config, self._tokens(kind))
        return found

    def _tokens(self, kind: str) -> dict[str, int]:
        found = {}
        for modality in _MEDIA[kind]:
            values = (getattr(self.config, key.format(modality), None) for key in _TOKEN_KEYS)
            if (value := next((value for value in values if isinstance(value, int)), None)) is not None:
                found[modality] = value
        return found

    @cached_property
    def sections(self) -> dict[str, dict[str, Any]]:
        """Keys of ``omni.encoders.<name>`` that the checkpoint decides, by the towers' names."""
        decided = self.family.sections(self.config)
        return {
            name: {"modality": tower.modality, **decided.get(name, {})} for name, tower in self.towers.items()
        }

    def class_name(self, name: str) -> str:
        """A global parameter name -> the parameter's name in the HF class."""
        for prefix, place in self._prefixes.items():
            if name.startswith(prefix):
                return place + name.removeprefix(prefix)
        raise KeyError(name)

    @cached_property
    def source(self) -> WeightSource:
        return WeightSource(self.path, WHERE)

    @cached_property
    def names(self) -> NameMap:
        return map_names(self.source.names(), self.model, shape_of=self.source.shape)

    def weights(self) -> ModelWeights:
        return ModelWeights(self)

    def recipes_of(self, name: str) -> dict[str, Recipe]:
        """By name in the HF class, how a global parameter is made: one, and copies of a tied matrix."""
        locals_ = [self.class_name(name)]
        if self.llm_config.tie_word_embeddings and name == "llm.model.embed_tokens.weight":
            locals_.append(self.class_name("llm.lm_head.weight"))
        return {local: self.names.recipes[local] for local in locals_ if local in self.names.recipes}

    def original_names(self, name: str) -> tuple[str, ...]:
        """Tensors of the checkpoint that a global parameter is made of."""
        recipes = self.recipes_of(name).values()
        return tuple(dict.fromkeys(source for recipe in recipes for source, _ in recipe.sources))

    def trained_names(self, encoder_names: Iterable[str]) -> set[str]:
        """Checkpoint tensors of the LLM and of the encoders, whose global names are given."""
        places = {self._prefixes[key]: key for key in ("llm.model.", "llm.lm_head.")}
        names = set(encoder_names)
        for local in self.names.recipes:
            names |= {key + local.removeprefix(p) for p, key in places.items() if local.startswith(p)}
        return {original for name in names for original in self.original_names(name)}

    def unused(self, encoder_names: Iterable[str]) -> dict[str, str]:
        """Checkpoint tensors nothing is made of, with the reason; an export holds them as they are."""
        trained = self.trained_names(encoder_names)
        local_of = {source: local for local, r in self.names.recipes.items() for source, _ in r.sources}
        reasons = {}
        for original in self.source.names():
            if original not in trained:
                local = local_of.get(original) or self.names.foreign.get(original)
                reasons[original] = "a buffer" if local is None else self._reason(local)
        return reasons

    def _reason(self, local: str) -> str:
        declared = next((why for p, why in self.family.unused.items() if local.startswith(p)), None)
        return declared or "above the layer whose output is used"

    def describe_unused(self, encoder_names: Iterable[str]) -> str:
        """A line for each reason; empty when every tensor is used."""
        by_reason: dict[str, list[str]] = {}
        for original, reason in self.unused(encoder_names).items():
            by_reason.setdefault(reason, []).append(original)
        return "\n".join(
            f"{len(names)} tensors are not used ({reason}) and exported as they are: {summarise(names, 3)}"
            for reason, names in by_reason.items()
        )


class ModelWeights(PartWeights):
    """All parts of a checkpoint under their global names."""

    def __init__(self, model: Multimodal):
        self._class_name = model.class_name
        declared = tuple(model.family.unused)
        super().__init__(
            model.source, "", model.model, model.names, lambda name: not name.startswith(declared or ("\0",))
        )

    def local(self, name: str) -> str:
        return self._class_name(name)


def read_model(section: Any) -> Multimodal:
    """The checkpoint of ``omni.model`` (``ModelConfig``); read once a process.

    Raises:
        UserError: it is missing, or of a family that is not supported.
    """
    return _read(section.path, section.trust_remote_code, _stamp(section.path))


@lru_cache(maxsize=4)
def _read(path: str, trust_remote_code: bool, stamp: int) -> Multimodal:
    config = read_config(path, trust_remote_code, "omni.model")
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UserError(
            f'{WHERE}: model_type "{config.model_type}" is not supported; supported are '
            f"{', '.join(FAMILIES)}. Parts of other models go into omni.llm and omni.encoders"
        )
    return Multimodal(path, family, getattr(config, family.inside, config) if family.inside else config)


def _stamp(path: str) -> int:
    """Changes with a local config.json."""
    file = Path(path) / "config.json"
    return file.stat().st_mtime_ns if file.is_file() else 0


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _kind(name: str) -> str | None:
    """The tower that a module named so is, or belongs to; None: a projector that does not say."""
    if "audio" in name:
        return "audio"
    return "vision" if any(word in name for word in ("vis", "image")) else None


def merged_section(name: str, given: Mapping[str, Any], decided: Mapping[str, Any]) -> dict[str, Any]:
    """A section of the configuration with what the checkpoint decides; UserError where they disagree."""
    result = dict(given)
    for key, value in decided.items():
        where = f"omni.encoders.{name}.{key}"
        if isinstance(value, Mapping):
            result[key] = merged_section(f"{name}.{key}", given.get(key) or {}, value)
        elif given.get(key) not in (None, value):
            raise UserError(f"{where} is {given[key]!r}, but the checkpoint has {value!r}; remove the key")
        else:
            result[key] = value
    return result
