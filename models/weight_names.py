"""Names of checkpoint tensors under the names of the HF class they are loaded into, by transformers' rules.

``transformers.conversion_mapping`` knows how names (and sometimes shapes) changed between releases, and how
a base model's names differ from those of a model with a head.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

# Buffers that older releases saved.
_OLD_BUFFERS = ("rotary_emb.inv_freq", "embeddings.position_ids")


@dataclass(frozen=True)
class Recipe:
    """How one tensor of the model is made: a tensor of the checkpoint as it is, or a conversion of several.

    ``sources``: (checkpoint name, pattern of the converter it matched); without a ``converter`` there is one,
    taken as it is.
    """

    target: str
    sources: tuple[tuple[str, str | None], ...]
    converter: WeightConverter | None = None

    def make(self, read: Callable[[str], Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """Tensors by their full names in the model; a conversion may give several."""
        if self.converter is None:
            return {self.target: read(self.sources[0][0])}
        converter = copy.deepcopy(self.converter)
        for name, pattern in self.sources:
            converter.add_tensor(self.target, name, pattern, read(name))
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def settled(self, shape_of: Callable[[str], tuple[int, ...]], model: PreTrainedModel) -> Recipe:
        """With its direction decided, where a conversion transposes only tensors of another shape than the
        model's: the same tensor in both directions, whole or in rows."""
        operations = self.converter.operations if self.converter is not None else []
        if not (len(operations) == len(self.sources) == 1 and getattr(operations[0], "check_dims", False)):
            return self
        if tuple(shape_of(self.sources[0][0])) == tuple(model.get_parameter(self.target).shape):
            return replace(self, converter=None)
        converter = copy.deepcopy(self.converter)
        converter.operations[0].check_dims = False
        return replace(self, converter=converter)

    def undo(
        self,
        made: Mapping[str, Tensor],
        shape_of: Callable[[str], tuple[int, ...]],
        model: PreTrainedModel,
    ) -> dict[str, Tensor]:
        """The tensors of the checkpoint by their names there, out of what :meth:`make` returns."""
        if self.converter is None:
            return {self.sources[0][0]: made[self.target]}
        forward, reverse = copy.deepcopy(self.converter), self.converter.reverse_transform()
        for name, value in made.items():
            target, pattern = reverse.rename_source_key(name)
            reverse.add_tensor(target, name, pattern, value)
        outputs: dict[str | None, list[Tensor]] = {}
        found = reverse.convert(target, model=model, config=model.config)
        for name in sorted(found, key=dot_natural_key):
            value = found[name][0] if isinstance(found[name], list) else found[name]
            outputs.setdefault(forward.rename_source_key(name)[1], []).append(value)
        tensors = {}
        for pattern, values in outputs.items():
            names = [name for name, of in self.sources if of == pattern]
            tensors |= dict(zip(names, values, strict=True))
        assert tensors.keys() == {name for name, _ in self.sources}, f"{self.target} is not made of {outputs}"
        for name, value in tensors.items():
            assert tuple(value.shape) == tuple(shape_of(name)), (
                f"{name} is {list(value.shape)} on its way back"
            )
        return tensors

    @property
    def keeps_rows(self) -> bool:
        """Whether row i of the tensor is made of row i of its one source."""
        operations = self.converter.operations if self.converter is not None else []
        moved = [op for op in operations if not isinstance(op, Transpose) or 0 in (op.dim0, op.dim1)]
        return len(self.sources) == 1 and not moved

    @property
    def stacks(self) -> bool:
        """Whether each row of the tensor is made of sources of its own: an expert of a fused weight."""
        first = self.converter.operations[0] if self.converter is not None else None
        return isinstance(first, MergeModulelist) and first.dim == 0

    def rows(self, start: int, stop: int) -> Recipe:
        """The recipe of rows [start, stop) alone, where it :attr:`stacks`."""
        by_pattern: dict[str | None, list[tuple[str, str | None]]] = {}
        for source in self.sources:
            by_pattern.setdefault(source[1], []).append(source)
        kept = tuple(source for sources in by_pattern.values() for source in sources[start:stop])
        return replace(self, sources=kept)


@dataclass(frozen=True)
class NameMap:
    """``recipes`` by model name; ``foreign``: checkpoint name -> the name it would have, absent from the
    model."""

    recipes: Mapping[str, Recipe]
    foreign: Mapping[str, str]


def map_names(
    names: Iterable[str],
    model: PreTrainedModel,
    strip: tuple[str, ...] = (),
    *,
    shape_of: Callable[[str], tuple[int, ...]],
) -> NameMap:
    """Map the names of a checkpoint onto a model (on the meta device; only its names, shapes and config are
    used).

    ``shape_of``: shape of a checkpoint tensor (``WeightSource.shape``). ``strip``: prefixes under which the
    model lies in a larger checkpoint, longest first (``model.encoder.`` for Whisper), for what transformers
    has no rule.
    """
    state = model.state_dict()
    buffers = {name for name, _ in model.named_buffers()}
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    converter_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    collected: dict[str, list[tuple[str, str | None]]] = {}
    foreign: dict[str, str] = {}
    for name in sorted(names, key=dot_natural_key):  # expert 2 before expert 10: conversions stack in order
        stem = next((name.removeprefix(prefix) for prefix in strip if name.startswith(prefix)), name)
        renamed, pattern = rename_source_key(stem, renamings, converters, model.base_model_prefix, state)
        if renamed not in state and stem in state:
            renamed, pattern = stem, None
        if renamed in state:
            collected.setdefault(renamed, []).append((name, pattern))
        elif renamed not in buffers and not renamed.endswith(_OLD_BUFFERS):
            foreign[name] = renamed
    recipes: dict[str, Recipe] = {}
    for target, sources in collected.items():
        pattern = sources[0][1]
        converter = converter_of[pattern] if pattern is not None else None
        recipe = Recipe(target, tuple(sources), converter).settled(shape_of, model)
        made = [target]
        if recipe.converter is not None:
            first = converter.target_patterns[0]
            made = [target.replace(first, other) for other in converter.target_patterns]
        recipes.update(dict.fromkeys(made, recipe))
    return NameMap(recipes, foreign)


def top_names(model: PreTrainedModel) -> frozenset[str]:
    """First components of a model's parameter names: what a foreign name must start with to be suspicious."""
    return frozenset(name.split(".", 1)[0] for name in model.state_dict())


def summarise(names: Iterable[Any], limit: int = 20) -> str:
    """Names for an error message, at most ``limit`` of them."""
    names = [str(name) for name in names]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
