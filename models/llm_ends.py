"""The ends of an LLM, which know its vocabulary: embedding, head, and the head of tied models.

Shapes: T packed tokens, R feature rows, P rows of all tensor ranks, D levels, N targets, H hidden size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from models.packed import PackedBatch, StageState
from omni_ds.parallel.layer_groups import ALONE, LayerGroups, even_part
from omni_ds.parallel.sums import sum_output
from omni_ds.plan.region import Region

_SCALED = ("gemma3_text",)  # embeddings are multiplied by the root of the width


class EmbedLayer(nn.Module):
    """Token embedding, with feature rows in the place of placeholder tokens. Also the head of tied models.

    Tensor ranks hold rows of the vocabulary each; a rank looks up its own tokens, writes the feature rows it
    has been sent, and one sum makes the hidden states whole. Its backward is the identity.
    """

    def __init__(self, config: PreTrainedConfig, groups: LayerGroups = ALONE, levels: int = 0):
        super().__init__()
        self.groups, self.levels = groups, levels
        self.vocab, padding = config.vocab_size, config.pad_token_id
        self.rows = even_part(self.vocab, groups.tensor)
        held = padding is not None and self.rows[0] <= padding < self.rows[1]
        padding = padding - self.rows[0] if held else None
        self.embed_tokens = nn.Embedding(self.rows[1] - self.rows[0], config.hidden_size, padding)
        self.embed_tokens.weight.tensor_model_parallel = groups.tensor is not None
        self._scale = config.hidden_size**0.5 if config.model_type in _SCALED else None

    def hf_names(self) -> dict[str, str]:
        return {"embed_tokens.weight": "llm.model.embed_tokens.weight"}

    def regions(self) -> dict[str, Region]:
        shape = (self.vocab, self.embed_tokens.embedding_dim)
        return {"embed_tokens.weight": Region.of(shape, 0, *self.rows)}

    def forward(self, state: StageState) -> StageState:
        """Sets hidden [T, H] and, of features with levels, levels [D, P, H]. Gradients reach features
        [R, H * (1 + D)] and, at all other tokens, the embedding.

        With several tensor ranks, R counts this rank's rows of the features; None when it has been sent none.
        """
        batch = state.batch
        features, levels = self._parts(batch.features)
        if self.groups.tensor is not None:
            hidden = self._summed_lookup(batch, features)
            levels = self._summed_levels(batch, levels)
        else:
            hidden = self._lookup(batch.input_ids)
            if batch.feature_positions is not None and batch.feature_positions.numel():
                assert features is not None, "feature positions without features"
                hidden = hidden.index_copy(0, batch.feature_positions, features.to(hidden.dtype))
        if self.groups.expert is not None and torch.is_grad_enabled() and not hidden.requires_grad:
            # The LLM is frozen and there are no media here; others of the expert group may have some, and
            # backward through the experts is a collective of all.
            hidden.requires_grad_()
        return replace(state, hidden=hidden, levels=levels)

    def _parts(self, features: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """([R, H], [D, R, H]) of features [R, H * (1 + D)]; None where there are none."""
        if features is None or not self.levels:
            return features, None
        parts = features.unflatten(1, (1 + self.levels, -1)).transpose(0, 1)
        return parts[0], parts[1:]

    def _summed_levels(self, batch: PackedBatch, levels: Tensor | None) -> Tensor | None:
        """Levels [D, P, H] of all tensor ranks out of this rank's [D, R, H]."""
        placeholders = batch.media_positions
        if not self.levels or placeholders is None or not placeholders.numel():
            return None
        shape = (self.levels, len(placeholders), self.embed_tokens.embedding_dim)
        whole = torch.zeros(shape, dtype=self.embed_tokens.weight.dtype, device=placeholders.device)
        if levels is not None:
            own = torch.searchsorted(placeholders, batch.feature_positions)  # both rise
            whole = whole.index_copy(1, own, levels.to(whole.dtype))
        return sum_output(whole, self.groups.tensor)

    def _lookup(self, ids: Tensor) -> Tensor:
        hidden = self.embed_tokens(ids)
        if self._scale is None:
            return hidden
        return hidden * float(torch.tensor(self._scale).to(hidden.dtype))  # rounded, as in HF's module

    def _summed_lookup(self, batch: PackedBatch, features: Tensor | None) -> Tensor:
        ids, (start, stop) = batch.input_ids, self.rows
        elsewhere = (ids < start) | (ids >= stop)
        placeholders = batch.media_positions
        if placeholders is not None:
            elsewhere = elsewhere.index_fill(0, placeholders, True)
        hidden = self._lookup((ids - start).masked_fill(elsewhere, 0))
        hidden = hidden.masked_fill(elsewhere.unsqueeze(1), 0.0)
        if features is not None:
            hidden = hidden.index_copy(0, batch.feature_positions, features.to(hidden.dtype))
        media = placeholders is not None and placeholders.numel() > 0
        if media and torch.is_grad_enabled() and not hidden.requires_grad:
            # The LLM is frozen, but another rank's features may need a gradient, whose backward pass is a
            # collective of all.
            hidden.requires_grad_()
        return sum_output(hidden, self.groups.tensor)


class HeadLayer(nn.Module):
    """Losses of an untied model; tensor ranks hold rows of the vocabulary each."""

    def __init__(self, config: PreTrainedConfig, groups: LayerGroups = ALONE):
        super().__init__()
        from omni_ds.parallel.vocabulary import VocabularyHead

        self._shape = (config.vocab_size, config.hidden_size)
        self._rows = even_part(config.vocab_size, groups.tensor)
        whole = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head = VocabularyHead(whole, groups.tensor)

    def hf_names(self) -> dict[str, str]:
        return {"lm_head.weight": "llm.lm_head.weight"}

    def regions(self) -> dict[str, Region]:
        return {"lm_head.weight": Region.of(self._shape, 0, *self._rows)}

    def forward(self, state: StageState) -> Tensor:
        return self.lm_head(state.hidden, state.batch.target_ids)


def tied_losses(module: EmbedLayer, state: StageState) -> Tensor:
    """Losses by the embedding matrix: the ``forward_fn`` of a tied head."""
    from omni_ds.parallel.vocabulary import target_losses

    return target_losses(
        state.hidden,
        module.embed_tokens.weight,
        state.batch.target_ids,
        module.vocab,
        module.groups.tensor,
        scores=not module.training,
    )
