"""Gives this rank's modules their weights on the CPU: all at once, or for ZeRO-3 layer by layer, each sharded
at once.

Weights that training rounds are kept as they were loaded: for the fp32 masters, and for exports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from models.loading import Loader, llm_loader, load_encoder, load_llm, load_model, model_loader
from models.parameters import held_parameters
from omni_ds.checkpoint.copies import Part
from omni_ds.checkpoint.fragments import WEIGHT
from omni_ds.checkpoint.state import EngineState
from omni_ds.composition import Composition
from omni_ds.config import Config
from omni_ds.engine.pipeline_module import OmniPipelineModule
from omni_ds.engine.plain_module import PlainModule
from omni_ds.engine.sharding import Sharder, piece_of
from omni_ds.parallel.agreement import all_or_error


@dataclass
class Loaded:
    """What is known of the weights once the modules have them.

    Attributes:
        source_dtypes: dtype a parameter was imported with, by global name; absent for fresh weights.
        originals: parts as loaded, on the CPU, where training rounds them.
        shards: the same, flat, where ZeRO-3 has cut the part: what this rank holds.
    """

    source_dtypes: dict[str, torch.dtype]
    originals: dict[Part, Tensor]
    shards: dict[Part, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def restore_masters(self, engines: Iterable[EngineState]) -> None:
        """Give the fp32 masters what was loaded: DeepSpeed makes them from the already rounded weights."""
        if not self.originals and not self.shards:
            return
        for engine in engines:
            for fragment in engine.fragments():
                if fragment.part in self.shards:
                    fragment.tensors[WEIGHT].copy_(self.shards[fragment.part][: fragment.length])
                elif fragment.part in self.originals:
                    local = self.originals[fragment.part].view(-1)
                    fragment.tensors[WEIGHT].copy_(local[fragment.offset : fragment.offset + fragment.length])
            engine.refresh()
        self.shards.clear()


def load_weights(
    config: Config,
    composition: Composition,
    module: OmniPipelineModule | PlainModule,
    encoders: Mapping[str, nn.Module],
    dtype: torch.dtype,
    control: ProcessGroup,
    sharder: Sharder | None,
) -> Loaded:
    """Fill the LLM's layers and the encoders; collective over the world.

    Args:
        dtype: of training.
        control: CPU group of the world.
        sharder: of the LLM under ZeRO-3: each layer is sharded before the next one is read.

    Raises:
        AgreedError: weights are missing, unexpected or mis-shaped; on every rank.
    """
    if sharder is not None:
        return _load_sharded(config, composition, module, encoders, dtype, control, sharder)
    layers = module.local_layers()
    dtypes = all_or_error(lambda: _load(config, composition, layers, encoders), control)
    return Loaded(dtypes, _originals([*layers, *encoders.values()], dtype, dtypes))


def _load(
    config: Config, composition: Composition, layers: list[nn.Module], encoders: Mapping[str, nn.Module]
) -> dict[str, torch.dtype]:
    seed = config.omni.train.seed
    if composition.model is not None:
        return load_model(layers, encoders.values(), composition.model, seed)
    dtypes = load_llm(layers, config.omni.llm, composition.llm_config, seed)
    return dtypes | _load_encoders(config, composition, encoders)


def _load_encoders(
    config: Config, composition: Composition, encoders: Mapping[str, nn.Module]
) -> dict[str, torch.dtype]:
    dtypes, seed = {}, config.omni.train.seed
    for name, encoder in encoders.items():
        dtypes |= load_encoder(encoder, config.omni.encoders[name], composition.encoder_configs[name], seed)
    return dtypes


def _load_sharded(
    config: Config,
    composition: Composition,
    module: OmniPipelineModule | PlainModule,
    encoders: Mapping[str, nn.Module],
    dtype: torch.dtype,
    control: ProcessGroup,
    sharder: Sharder,
) -> Loaded:
    layers = module.local_layers()

    def begin() -> tuple[Loader, dict[str, torch.dtype]]:
        """Find all that does not fit before the first layer is sharded; the encoders, which are whole."""
        seed = config.omni.train.seed
        if composition.model is not None:
            loader = model_loader(composition.model, seed)
            loader.check([*layers, *encoders.values()])
            return loader, loader.fill_all(encoders.values())
        loader = llm_loader(config.omni.llm, composition.llm_config, seed)
        loader.check(layers)
        return loader, _load_encoders(config, composition, encoders)

    loader, dtypes = all_or_error(begin, control)
    originals, shards = _originals(encoders.values(), dtype, dtypes), {}
    for layer in layers:
        all_or_error(lambda layer=layer: loader.fill(layer), control)
        whole = _originals([layer], dtype, loader.dtypes)
        sharder.shard(layer)
        for held in held_parameters([layer]):
            part = held.name, held.region
            if part in whole and held.parameter.requires_grad:
                shards[part] = piece_of(held.parameter, whole.pop(part))
        originals |= whole
    return Loaded(dtypes | loader.dtypes, originals, shards)


def _originals(
    modules: Iterable[nn.Module], dtype: torch.dtype, source_dtypes: Mapping[str, torch.dtype]
) -> dict[Part, Tensor]:
    """The weights as loaded, where training rounds them: its own get other memory when they are cast."""
    if dtype == torch.float32:
        return {}
    return {
        (h.name, h.region): h.parameter.detach()
        for h in held_parameters(modules)
        if source_dtypes.get(h.name, torch.float32) != dtype
    }
