"""The whole LLM as a plain module, for ZeRO-2 and 3, which DeepSpeed refuses for a PipelineModule.

Layers hand each other a state, not tensors, and some use a weight outside of the module that holds it;
ZeRO-3 gathers and releases weights around modules whose inputs and outputs it can see. So each block of
layers is wrapped in a module that takes and returns hidden states, and all weights of a block are gathered
together.
"""

import functools
from collections.abc import Sequence

import deepspeed
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn

from models.init import empty_parameters
from models.llm import DecoderLayer, LayerDef
from models.packed import PackedBatch, StageState
from models.parameters import HeldParameter, held_parameters
from omni_ds.engine.expert_load import ExpertCounts
from omni_ds.engine.stage_layers import (
    Block,
    Layer,
    Tensors,
    blocks_of,
    distinct_modules,
    tensors_of,
    with_tensors,
)


class PlainModule(nn.Module):
    """The layers of a whole LLM, with the interface of
    :class:`~omni_ds.engine.pipeline_module.OmniPipelineModule`.

    Args:
        layers: of the LLM.
        block: number of consecutive decoder layers that are recomputed together in the backward pass; 0 and
            1: none here.
    """

    def __init__(self, layers: Sequence[LayerDef], block: int = 0):
        super().__init__()
        with empty_parameters():
            built = _build(layers)
        self._modules_of_layers = tuple(distinct_modules(built))
        self.blocks = nn.ModuleList(_Gathered(each) for each in blocks_of(built, block))
        self.expert_counts = ExpertCounts()
        object.__setattr__(self, "encoder_anchor", None)

    def mark_replicated(self) -> None:
        """Every parameter is held once."""
        for parameter in self.parameters():
            parameter.ds_pipe_replicated = False

    def declare_weights(self) -> None:
        """Tell ZeRO-3 which weights each block uses; once they have their values."""
        for block in self.blocks:
            block.declare()

    def anchor_encoders(self, encoders: nn.Module | None) -> None:
        """Attach the encoders this rank runs beside the LLM, outside the parameter registry."""
        object.__setattr__(self, "encoder_anchor", encoders)

    def forward(self, batch: PackedBatch, hidden: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """As ``OmniPipelineModule.forward`` of a single stage."""
        carrier, tensors = _Carrier(StageState(batch)), (hidden, None, None)
        *body, head = self.blocks
        for block in body:
            tensors = carrier.unpacked(block(*tensors, carrier))
        losses = head(*tensors, carrier)
        self.expert_counts.add(carrier.state.router_counts)
        return losses, tensors[1]

    def local_layers(self) -> list[nn.Module]:
        """The distinct modules of the LLM in order."""
        return list(self._modules_of_layers)

    def held(self) -> list[HeldParameter]:
        """All parameters by global name (``llm.model.layers.0...``), each with the part it is."""
        return held_parameters(self._modules_of_layers)


def _build(layers: Sequence[LayerDef]) -> list[Layer]:
    """Layers of one tied key share the module of the first."""
    tied: dict[str, nn.Module] = {}
    built: list[Layer] = []
    for layer in layers:
        module = tied.get(layer.tied_key) or layer.build()
        if layer.tied_key is not None:
            tied[layer.tied_key] = module
        built.append(module if layer.forward_fn is None else functools.partial(layer.forward_fn, module))
    return built


class _Carrier:
    """Hands on, beside the tensors, what the layers of a pass prepare for each other.

    Tensors leave a module without the gaps of those there are not (DeepSpeed's hooks see its outputs).
    """

    def __init__(self, state: StageState):
        self.state, self._present = state, (True, False, False)

    def packed(self, state: StageState) -> tuple[Tensor, ...]:
        self.state, tensors = with_tensors(state), tensors_of(state)
        self._present = tuple(tensor is not None for tensor in tensors)
        return tuple(tensor for tensor in tensors if tensor is not None)

    def unpacked(self, tensors: tuple[Tensor, ...]) -> Tensors:
        found = iter(tensors)
        return tuple(next(found) if present else None for present in self._present)


class _Gathered(nn.Module):
    """A block whose weights ZeRO-3 gathers around it.

    A block of decoder layers is one unit for DeepSpeed (a leaf): no hooks inside, and so none while
    activations are recomputed. A leaf's gradients are reduced when that of its input is there; the embedding
    has no such input, and a tied weight is not complete then. Other blocks name the weights that they use,
    and DeepSpeed reduces each when it is complete.
    """

    def __init__(self, block: Block):
        super().__init__()
        self.layers = nn.ModuleList(layer for layer in block.layers if isinstance(layer, nn.Module))
        self._block = block
        self._leaf = all(isinstance(layer, DecoderLayer) for layer in block.layers)
        set_z3_leaf_module(self, self._leaf)

    def declare(self) -> None:
        for module in [] if self._leaf else distinct_modules(self._block.layers):
            for parameter in module.parameters():
                deepspeed.zero.register_external_parameter(self, parameter)

    def forward(
        self, hidden: Tensor | None, auxiliary: Tensor | None, levels: Tensor | None, carrier: _Carrier
    ) -> Tensor | tuple[Tensor, ...]:
        """Hidden states [T, H] (None for the embedding), router loss, levels of features -> those of them
        that there are; the head's output."""
        out = self._block(with_tensors(carrier.state, hidden, auxiliary, levels))
        return out if isinstance(out, Tensor) else carrier.packed(out)
