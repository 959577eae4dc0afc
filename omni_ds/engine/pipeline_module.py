"""The LLM's stages as a DeepSpeed PipelineModule that carries the encoder anchor."""

import contextlib
import io
from collections.abc import Sequence

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from models.init import empty_parameters
from models.llm import LayerDef
from models.packed import PackedBatch, StageState
from models.parameters import HeldParameter, held_parameters
from omni_ds.engine.expert_load import ExpertCounts
from omni_ds.engine.stage_layers import blocks_of, distinct_modules
from omni_ds.plan.build import Plan


def _spec(layer: LayerDef) -> LayerSpec:
    if layer.tied_key is None:
        return LayerSpec(layer.cls, *layer.args, **layer.kwargs)
    return TiedLayerSpec(
        layer.tied_key,
        layer.cls,
        *layer.args,
        forward_fn=layer.forward_fn,
        tied_weight_attr=["embed_tokens.weight"],
        **layer.kwargs,
    )


class OmniPipelineModule(PipelineModule):
    """This rank's LLM layers, cut as the plan says, with the encoders anchored on every stage.

    The anchor (:attr:`encoder_anchor`) is held outside the parameter registry: its parameters belong to the
    encoder engine, and a registered module would be reduced and stepped twice.

    Args:
        layers: of the whole LLM.
        plan: says which of them are on this stage.
        block: number of consecutive decoder layers that are recomputed together in the backward pass; 0 and
            1: none here.
    """

    def __init__(self, layers: Sequence[LayerDef], plan: Plan, block: int = 0):
        mesh = plan.mesh
        self._boundaries = stage_boundaries(plan, len(layers))
        topology = PipeModelDataParallelTopology(
            num_pp=mesh.pipe, num_mp=mesh.tensor, num_dp=mesh.data_degree
        )
        # DeepSpeed prints every layer of every stage; parameters get their memory when they get their values.
        with contextlib.redirect_stdout(io.StringIO()), empty_parameters():
            super().__init__(layers=[_spec(layer) for layer in layers], topology=topology)
        self._blocks = blocks_of(self.forward_funcs, block)
        self.expert_counts = ExpertCounts()
        object.__setattr__(self, "encoder_anchor", None)

    def to(self, *args, **kwargs) -> "OmniPipelineModule":
        """As ``nn.Module.to``; nothing while parameters are empty (DeepSpeed moves what it builds)."""
        if any(parameter.is_meta for parameter in self.parameters()):
            return self
        return super().to(*args, **kwargs)

    def _synchronize_tied_weights(self) -> None:
        pass  # every stage reads the same checkpoint, or draws by name from the same seed

    def mark_replicated(self) -> None:
        """Flag tied weights that another stage owns, so that norms and checkpoints count them once.

        Called after loading, which gives every parameter a new tensor without the flags of the first.
        """
        for parameter in self.parameters():
            parameter.ds_pipe_replicated = False
        for tied in self.tied_comms.values():
            if self.global_rank != tied["ranks"][0]:
                for parameter in tied["module"].parameters():
                    parameter.ds_pipe_replicated = True

    def _partition_layers(self, method: str = "plan") -> None:
        del method  # the plan has decided
        self.parts = self._boundaries
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def anchor_encoders(self, encoders: nn.Module | None) -> None:
        """Attach the encoders this stage runs beside its layers."""
        object.__setattr__(self, "encoder_anchor", encoders)

    def forward(self, batch: PackedBatch, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Run this stage's layers.

        Args:
            batch: the packed micro-batch (ids, positions, segment boundaries), or its shard.
            hidden: what the previous stage sent; None on the first.

        Returns:
            Hidden states [T, H] for the next stage, behind them the levels of features that are still to be
            added (``StageState.message``), or what the last layer makes of it (losses of the targets); and
            the router losses of these layers, None without any.
        """
        state: StageState | Tensor = (
            StageState(batch) if hidden is None else StageState.received(batch, hidden)
        )
        last = state
        for block in self._blocks:
            state = block(state)
            if isinstance(state, StageState):
                last = state
        self.expert_counts.add(last.router_counts)
        return state.message() if isinstance(state, StageState) else state, last.auxiliary

    def local_layers(self) -> list[nn.Module]:
        """The distinct modules of this stage in order."""
        return distinct_modules(self.forward_funcs)

    def held(self) -> list[HeldParameter]:
        """This stage's parameters by global name (``llm.model.layers.0...``), each with the part it is."""
        return held_parameters(self.local_layers())


def stage_boundaries(plan: Plan, layers: int) -> list[int]:
    """First layer of every stage in [embedding, decoder layers..., norm, head], and the end of that list."""
    starts = [0] + [start + 1 for start, _ in plan.stages[1:]]
    return [*starts, layers]


def stage_device(local_rank: int) -> torch.device:
    """The device of this process."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank)
    return torch.device("cpu")
