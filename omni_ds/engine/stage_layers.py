"""A stage as a list of layers: running them, in blocks that are recomputed together, and their names.

Shared by the pipeline module and the plain module of a stage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.llm import DecoderLayer
from models.packed import StageState

# A module, or a function of one: ``functools.partial(forward_fn, module)``, the head of a tied model.
Layer = Callable[[StageState], StageState | Tensor]
Tensors = tuple[Tensor | None, Tensor | None, Tensor | None]


def module_of(layer: Layer) -> nn.Module:
    return layer if isinstance(layer, nn.Module) else layer.args[0]


def distinct_modules(layers: Sequence[Layer]) -> list[nn.Module]:
    """The modules of the layers in order, each once."""
    return list(dict.fromkeys(module_of(layer) for layer in layers))


@dataclass(frozen=True)
class Block:
    """Consecutive layers; with ``recompute`` only their input is kept between forward and backward."""

    layers: tuple[Layer, ...]
    recompute: bool = False

    def __call__(self, state: StageState) -> StageState | Tensor:
        """Run the layers on a state; the last block of a model ends with its head, which returns a tensor."""
        if not self.recompute or not torch.is_grad_enabled():
            return _run(self.layers, state)
        held = state

        def run(*tensors: Tensor | None) -> Tensors:
            nonlocal held
            held = _run(self.layers, with_tensors(held, *tensors))
            # What the layers prepared for each other serves the next block too; tensors of this graph do not.
            held, outputs = with_tensors(held), tensors_of(held)
            return outputs

        return with_tensors(
            held, *checkpoint(run, *tensors_of(state), use_reentrant=False, preserve_rng_state=False)
        )


def blocks_of(layers: Sequence[Layer], size: int) -> list[Block]:
    """Cut layers into blocks: with ``size`` > 1, decoder layers by that number, recomputed together; all
    else one by one (``size`` 1 is left to the layers themselves)."""
    blocks: list[Block] = []
    together: list[Layer] = []

    def close() -> None:
        if together:
            blocks.append(Block(tuple(together), recompute=True))
            together.clear()

    for layer in layers:
        if size > 1 and isinstance(module_of(layer), DecoderLayer):
            together.append(layer)
            if len(together) == size:
                close()
        else:
            close()
            blocks.append(Block((layer,)))
    close()
    return blocks


def tensors_of(state: StageState) -> Tensors:
    """What of a state has a gradient: hidden states, router loss, levels."""
    return state.hidden, state.auxiliary, state.levels


def with_tensors(
    state: StageState,
    hidden: Tensor | None = None,
    auxiliary: Tensor | None = None,
    levels: Tensor | None = None,
) -> StageState:
    """The state with others of these."""
    return replace(state, hidden=hidden, auxiliary=auxiliary, levels=levels)


def _run(layers: Sequence[Layer], state: StageState) -> StageState | Tensor:
    for layer in layers:
        state = layer(state)
    return state
