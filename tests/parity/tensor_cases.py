"""Cases of tensor parallelism: a small LLM, its reference in one process, and the same on a tensor rank."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from models.checkpoint_files import WeightSource
from models.freeze import set_trainable
from models.init import empty_parameters
from models.llm import LayerDef, build_llm_layers
from models.loading import load_llm
from models.packed import PackedBatch, StageState
from models.parameters import held_parameters
from omni_ds.parallel.layer_groups import LayerGroups, even_part, index
from omni_ds.plan.mesh import Mesh
from omni_ds.plan.region import Region
from tests.unit.model_helpers import llm_config, packed_batch

VOCAB = 151
LENGTHS = ((9, 5, 1, 9, 23, 6), (4, 17))  # of two micro-batches, whose gradients accumulate
PLACEHOLDERS = (2, 3, 4, 10, 16)  # in each


@dataclass
class Case:
    """``grown``: rows of the vocabulary that the checkpoint lacks; ``media``: placeholders in a batch."""

    label: str
    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    recompute: bool = False
    dtype: torch.dtype = torch.float32
    frozen: bool = False
    grown: int = 0
    media: int = len(PLACEHOLDERS)
    folder: Path | None = None

    def config(self, grown: int = 0) -> PreTrainedConfig:
        changes = {"vocab_size": VOCAB + grown} | self.changes
        return AutoConfig.for_model(**llm_config(self.family, **changes))

    def batches(self) -> list[PackedBatch]:
        made = []
        for seed, lengths in enumerate(LENGTHS):
            batch = packed_batch(lengths, VOCAB, seed)
            generator = torch.Generator().manual_seed(seed)
            batch.placeholder_positions = torch.tensor(PLACEHOLDERS[: self.media], dtype=torch.int64)
            batch.features = torch.randn(self.media, 32, generator=generator)
            made.append(batch)
        return made


@dataclass
class Run:
    """Losses and argmax [2, N] in evaluation, losses in training, gradients of features, by micro-batch."""

    scores: list[Tensor]
    losses: list[Tensor]
    features: list[Tensor]


@dataclass
class Held:
    """A parameter of a rank: the part it is, its value, gradient, and whether the norm counts it there."""

    name: str
    region: Region
    value: Tensor
    gradient: Tensor | None
    counted: bool


@dataclass
class RankResult(Run):
    held: list[Held]
    bytes_read: int
    reads: list[str]
    fresh: list[Held]


def reference(case: Case) -> tuple[Run, dict[str, Tensor], dict[str, Tensor | None]]:
    """Run HF's model, sample by sample in fp32, after saving it where the ranks load it from; its values and
    gradients by global name."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(case.config(), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, or a lost one would not show
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(case.folder)
    if case.grown:
        model.resize_token_embeddings(VOCAB + case.grown, mean_resizing=False)
        with torch.no_grad():
            for table in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
                table[VOCAB:] = table[:VOCAB].mean(0)
    model.requires_grad_(not case.frozen)
    run = Run([], [], [])
    for batch in case.batches():
        features = batch.features.requires_grad_()
        embeds = model.get_input_embeddings()(batch.input_ids)
        embeds = embeds.index_copy(0, batch.placeholder_positions, features)
        logits, start = [], 0
        for length in batch.segments:
            rows = embeds[start : start + length][None]
            logits.append(model(inputs_embeds=rows, use_cache=False).logits[0, :-1])
            start += length
        logits = torch.cat(logits)
        losses = F.cross_entropy(logits, batch.target_ids, reduction="none")
        losses.sum().backward()
        correct = (logits.argmax(-1) == batch.target_ids).float()
        run.scores.append(torch.stack([losses, correct]).detach())
        run.losses.append(losses.detach())
        run.features.append(features.grad)
    values = {f"llm.{name}": p.detach() for name, p in model.named_parameters()}
    return run, values, {f"llm.{name}": p.grad for name, p in model.named_parameters()}


def build(definitions: list[LayerDef]) -> list[torch.nn.Module]:
    tied: dict[str, torch.nn.Module] = {}
    modules = []
    with empty_parameters():
        for definition in definitions:
            module = tied.get(definition.tied_key) or definition.build()
            if definition.tied_key:
                tied[definition.tied_key] = module
            modules.append(module)
    return modules


def forward(definitions: list[LayerDef], modules: list[torch.nn.Module], batch: PackedBatch) -> Tensor:
    state = StageState(batch)
    for definition, module in zip(definitions, modules, strict=True):
        state = definition.forward_fn(module, state) if definition.forward_fn else module(state)
    return state


def on_rank(case: Case, groups: LayerGroups) -> RankResult:
    """Load this rank's slices and run both micro-batches, with this rank's rows of the features."""
    config = case.config(case.grown)
    definitions = build_llm_layers(copy.deepcopy(config), recompute=case.recompute, groups=groups)
    modules = build(definitions)
    distinct = list(dict.fromkeys(modules))
    for module in distinct:
        set_trainable(module, not case.frozen)
        module.to(case.dtype)
    for held in held_parameters(distinct):
        assert held.parameter.is_meta and held.parameter.shape == held.region.local_shape, held.name
    reads: list[tuple[str, int]] = []
    original = WeightSource.read

    def counted(self: WeightSource, name: str, part: Any = None) -> Tensor:
        value = original(self, name, part)
        reads.append((name, value.nbytes))
        return value

    WeightSource.read = counted
    load_llm(distinct, SimpleNamespace(path=str(case.folder)), config, seed=0)
    WeightSource.read = original
    result = RankResult([], [], [], [], sum(size for _, size in reads), [name for name, _ in reads], [])
    for batch in case.batches():
        start, stop = even_part(case.media, groups.tensor)
        batch.feature_positions = batch.placeholder_positions[start:stop]
        features = batch.features[start:stop].to(case.dtype).requires_grad_()
        batch.features = features if start < stop else None  # as the engine hands them over
        for module in distinct:
            module.eval()
        with torch.no_grad():
            result.scores.append(forward(definitions, modules, batch))
        for module in distinct:
            module.train()
        losses = forward(definitions, modules, batch)
        losses.sum().backward()
        result.losses.append(losses.detach())
        result.features.append(features.grad if start < stop else features.detach())
    result.held = held_on_rank(distinct, groups)
    untrained = list(dict.fromkeys(build(definitions)))
    for module in untrained:
        module.to(case.dtype)
    load_llm(untrained, SimpleNamespace(path=None), config, seed=3)
    result.fresh = held_on_rank(untrained, groups)
    return result


def held_on_rank(modules: list[torch.nn.Module], groups: LayerGroups) -> list[Held]:
    first = index(groups.tensor) == 0
    return [
        Held(
            held.name,
            held.region,
            held.parameter.detach(),
            held.parameter.grad,
            first or is_model_parallel_parameter(held.parameter),
        )
        for held in held_parameters(modules)
    ]


def all_on_rank(cases: list[Case], world: int) -> list[RankResult]:
    results = []
    for case in cases:
        kv_heads = case.config().num_key_value_heads
        groups = LayerGroups.create(Mesh(1, 1, tensor=world), kv_heads, timedelta(minutes=5))
        results.append(on_rank(case, groups))
    return results
