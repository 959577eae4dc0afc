"""Bytes of activations on a rank: what autograd keeps of live micro-batches and encoder windows.

Counted by the tensors that HF's layers with our packed attention save for the backward pass, each once, of
`element` bytes a number (RMSNorm works in fp32 whatever that is):

- a norm: its input and output and the normalised input; in bf16 the first of these in fp32;
- attention: queries, keys (before the rotation too where they are normalised), values, output, softmax
  statistics; keys and values once a query head where the kernel does not share them;
- the MLP: gate, its activation, up, their product; experts: the same for every slot, and the slots' input
  and output.

With fused kernels (models/fused.py, models/linears.py, on a GPU) a norm keeps its input and output alone, and
an MLP neither the activation nor the product; heads of attention may be padded.

With recomputation the input of a layer is all that stays, and the layer that runs has all of it. The head's
logits never exist whole: the cross-entropy holds a block of them (omni_ds/parallel/linear_cross_entropy.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from omni_ds.plan.held import LayerShare
from omni_ds.plan.llm_meta import LLMMeta

ENOUGH = 8192  # encoder tokens of a window and rank that keep a device busy; on one stage it has no more
_FILLED_BY_PROJECTIONS = ("siglip", "clip", "whisper")  # heads; padded weights are kept for it
_FUSED_TOWERS = (*_FILLED_BY_PROJECTIONS, "qwen2_5_vl")
SHORT_WINDOW = 64  # tokens that one tile of models/window_attention.py holds
# Queries, keys and values are one tensor, which lives as long as the values; the others are rotated copies.
_JOINT_PROJECTION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
LOGITS = 1 << 27  # numbers of a block of logits, 512 MiB in fp32: losses on shards; twice as many on one rank

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_ds.plan.encoder_meta import EncoderMeta
    from omni_ds.plan.plan import Plan, StepPlan


@dataclass(frozen=True)
class Load:
    """What a step gives a replica to do.

    micro_batches: how many; tokens, targets, features: of the largest one (whole sequence); encoders: name ->
    (tokens, feature rows) of an average one.
    """

    micro_batches: int
    tokens: int
    targets: int
    features: int = 0
    encoders: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, step: StepPlan) -> Load:
        """Of a planned step; the most of any replica."""
        batches = [mb for replica in step.replicas for mb in replica.micro_batches]
        loads: dict[str, tuple[int, int]] = {}
        for replica in step.replicas:
            for name in replica.encoders:
                items = [i for mb in replica.micro_batches for s in mb.samples for i in s.items]
                mine = [item for item in items if item.encoder == name]
                tokens = -(-sum(sum(item.segments) for item in mine) // step.micro_batches)
                rows = -(-sum(item.rows for item in mine) // step.micro_batches)
                before = loads.get(name, (0, 0))
                loads[name] = (max(before[0], tokens), max(before[1], rows))
        return cls(
            micro_batches=step.micro_batches,
            tokens=max((mb.tokens for mb in batches), default=0),
            targets=max((mb.target_tokens for mb in batches), default=0),
            features=max((sum(i.rows for s in mb.samples for i in s.items) for mb in batches), default=0),
            encoders=loads,
        )

    def grown(self, tokens: int) -> Load:
        """The same with a largest micro-batch of `tokens`, targets and features in proportion."""
        if not self.tokens or tokens <= self.tokens:
            return self
        scaled = {
            name: tuple(-(-count * tokens // self.tokens) for count in counts)
            for name, counts in self.encoders.items()
        }
        return Load(
            self.micro_batches,
            tokens,
            -(-self.targets * tokens // self.tokens),
            -(-self.features * tokens // self.tokens),
            scaled,
        )


@dataclass(frozen=True)
class Activations:
    """saved: bytes kept for backward passes to come, when most are; live: micro-batches among them; working:
    what the pass that runs adds; steady: forwards go on after the first backward."""

    saved: int
    working: int
    live: int
    steady: bool


def norm_bytes(width: int, element: int, fused: bool = False) -> int:
    """Of one RMSNorm, by token."""
    if fused:
        return 2 * width * element + 4
    return 3 * width * 4 if element == 4 else width * (4 + 2 * element)


@lru_cache(maxsize=8192)
def layer_bytes(llm: LLMMeta, index: int, tensor: int, element: int, fused: bool) -> int:
    """What decoder layer `index` keeps of a token on a tensor rank."""
    share = LayerShare.of(llm, tensor)
    simple = fused and llm.norms == 2  # kernels are for layers of the Llama shape
    total = 2 * norm_bytes(llm.hidden, element, simple)
    total += (
        (llm.norms - 2) * 8 * llm.hidden
    )  # behind a block: fp32 input and normalised input; a sum keeps none
    if llm.qk_norm:  # input and normalised input; the rotation keeps no output of a norm
        kept = element if simple else 8 if element == 4 else 4 + element
        total += (share.query + share.key) * kept
    # elsewhere than in a kernel for packed sequences, the output is unpacked into another tensor
    kept = 2 * share.query + 2 * share.key if fused else 5 * share.query
    total += element * kept + 4 * share.heads
    if index not in llm.moe_layers:
        kept = (2 if tensor == 1 else 3) if simple else 4
        return total + kept * element * share.inner
    slot = 4 * llm.moe_intermediate + 2 * llm.hidden
    return total + element * llm.experts_per_token * slot + 8 * llm.experts


def head_bytes(llm: LLMMeta, element: int, fused: bool) -> int:
    """What norm and head keep of a target; losses are a few numbers."""
    return norm_bytes(llm.hidden, element, fused and llm.norms == 2) + 32


def encoder_bytes(meta: EncoderMeta, element: int, fused: bool) -> tuple[int, int]:
    """(of a token in the tower, of a feature row in the projector)."""
    inner, padded = (4 if meta.mlp_matrices == 3 else 2), 0
    if fused and meta.model_type.startswith(_FUSED_TOWERS):
        inner //= 2
    if fused:  # query, key, value and output in heads of whole 32s; elsewhere the output without padding too
        padded = 4 * _missing(meta)
        if padded and not meta.model_type.startswith(_FILLED_BY_PROJECTIONS):
            padded += meta.hidden
        padded += 2 * meta.hidden * meta.model_type.startswith(_JOINT_PROJECTION)
    layers = meta.layers * (8 * meta.hidden + inner * meta.intermediate)
    layers += padded * (meta.layers - (_window_layers(meta) if fused and element == 2 else 0))
    tower = element * (layers + meta.stem_width) if meta.tower_trainable else 0
    row = (1 + meta.levels) * (meta.projector_in + 2 * meta.projector_hidden)
    rows = element * row if meta.trainable else 0
    return tower, rows


def _window_layers(meta: EncoderMeta) -> int:
    """Whose attention is one kernel with its rotation (models/window_attention.py), which keeps the joint
    projection alone: in bf16 and with Liger, which predictions for GPUs take for installed."""
    side = getattr(meta, "window_side", 0) * meta.factor
    return meta.layers - meta.full_layers if 0 < side**2 <= SHORT_WINDOW else 0


def _missing(meta: EncoderMeta) -> int:
    """Zeros behind the heads of a token."""
    return -(meta.hidden // meta.heads) % 32 * meta.heads


def _padded_weights(meta: EncoderMeta, element: int, fused: bool) -> int:
    """Of queries, keys, values and output, kept by every pass; with recomputation of one layer at a time."""
    if not (fused and meta.tower_trainable and meta.model_type.startswith(_FILLED_BY_PROJECTIONS)):
        return 0
    missing = _missing(meta)
    return meta.layers * 4 * meta.hidden * (meta.hidden + missing) * element if missing else 0


def activations(plan: Plan, stage: int, load: Load, element: int, *, fused: bool) -> Activations:
    """On a rank of `stage` under 1F1B: stage s holds at most stages - s micro-batches (base.one_f_one_b)."""
    llm, mesh, recompute = plan.llm, plan.mesh, plan.options.recompute
    tokens, targets = -(-load.tokens // mesh.sequence), -(-load.targets // mesh.sequence)
    warm_up = mesh.pipe - stage
    live = min(warm_up, load.micro_batches)
    layers = [layer_bytes(llm, i, mesh.tensor, element, fused) for i in range(*plan.stages[stage])]
    ends = 2 * element * (llm.hidden + llm.head_dim)  # what came in and goes out; the rotation's tables
    per_token = ends + (len(layers) * element * llm.hidden if recompute else sum(layers))
    saved = live * tokens * per_token
    working = _layer_working(llm, mesh.tensor, element) * tokens
    if recompute:
        working += max(layers) * tokens
    vocabulary = -(-llm.vocab // mesh.tensor) * llm.hidden * element * llm.trainable
    if stage == mesh.pipe - 1:
        saved += live * targets * head_bytes(llm, element, fused)
        working = max(working, _head_working(llm, mesh.tensor, targets, element))
    if stage == 0:
        working = max(working, vocabulary)  # the embedding's gradient, before it is added
        saved += live * load.features * plan.row_width * element
    else:
        saved += live * load.features * plan.levels_into(stage) * llm.hidden * element
    windows, running = _encoder_windows(plan, stage, load, element, fused)
    return Activations(saved + windows, max(working, running), live, load.micro_batches > warm_up)


def _head_working(llm: LLMMeta, tensor: int, targets: int, element: int) -> int:
    """A block of logits as gradients of activations, fp32 before; the gradients of both factors."""
    rows = -(-llm.vocab // tensor)
    alone = tensor == 1  # then forward makes gradients, with fp32 probabilities beside the logits
    logits = min(targets * rows, LOGITS * (2 if alone else 1)) * (element + (8 if alone else 4))
    weight = rows * llm.hidden * (4 + element if alone and element < 4 else 4) * llm.trainable
    return logits + weight + targets * llm.hidden * 4


def _layer_working(llm: LLMMeta, tensor: int, element: int) -> int:
    """Gradients of activations alive at once in a layer's backward, by token: those of the MLP."""
    share = LayerShare.of(llm, tensor)
    inner = max(share.inner, llm.experts_per_token * llm.moe_intermediate)
    return element * (3 * inner + 2 * llm.hidden)


def _encoder_windows(plan: Plan, stage: int, load: Load, element: int, fused: bool) -> tuple[int, int]:
    """(kept, of the running pass) bytes of encoders on a rank of this stage: its share of as many
    micro-batches' media as the plan lets live, at most all of them."""
    if plan.first_stage_only and stage > 0:
        return 0, 0
    mesh = plan.mesh
    sharers = mesh.lanes * (1 if plan.first_stage_only else mesh.pipe)
    live = min(plan.options.live_micro_batches or max(4, mesh.pipe), load.micro_batches)
    if mesh.pipe == 1 and load.encoders:  # windows of just enough tokens, one at a time (weave.py)
        tokens = max(1, sum(tokens for tokens, _ in load.encoders.values()))
        live = min(live, -(-ENOUGH * mesh.lanes // tokens))
    kept = running = 0
    for meta in plan.encoders:
        tokens, rows = load.encoders.get(meta.name, (0, 0))
        tower, row = encoder_bytes(meta, element, fused)
        weights = _padded_weights(meta, element, fused) if tokens else 0
        whole = tokens * tower
        if plan.options.encoder_recompute and tower:
            whole = tokens * element * (meta.layers + 2) * meta.hidden
            running = max(running, -(-tokens * tower // (meta.layers * sharers)) + weights // meta.layers)
        else:
            kept += live * weights
        kept += -(-live * (whole + meta.projected_rows(tokens, rows) * row) // sharers)
    return kept, running
