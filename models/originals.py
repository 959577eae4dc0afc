"""Trained parameters as the tensors of the checkpoint they came from: transformers' conversions undone."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from models.multimodal import Multimodal


class Originals:
    """Called with a global name and a whole parameter; gives the checkpoint's tensors by their names there.

    Where several parameters are made of the same tensors, these come with the last of them; a tensor whose
    parameters do not all come never does.
    """

    def __init__(self, model: Multimodal):
        self._model = model
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self._parts: dict[str, set[str]] = {}
        for local, recipe in model.names.recipes.items():
            self._parts.setdefault(recipe.target, set()).add(local)

    def __call__(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        written = set()
        for local, recipe in self._model.recipes_of(name).items():
            made = self._waiting.setdefault(recipe.target, {})
            made[local] = tensor
            if made.keys() == self._parts[recipe.target]:
                del self._waiting[recipe.target]
                found = recipe.undo(made, self._model.source.shape, self._model.model)
                yield from ((original, value) for original, value in found.items() if original not in written)
                written |= found.keys()
