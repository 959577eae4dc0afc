"""Argmax over blocks of the vocabulary, and tensor plans that are refused."""

import pytest
import torch
from transformers import AutoConfig

from models.decoders import tensor_sizes
from models.llm import build_llm_layers
from omni_ds.errors import UserError
from omni_ds.parallel.layer_groups import ALONE
from omni_ds.parallel.tensor import shard_decoder_layer
from omni_ds.parallel.vocabulary import best_ids
from tests.unit.model_helpers import llm_config


def test_best_ids_are_the_argmax_and_the_smaller_of_equals() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator) for shape in ((40, 4), (31, 4)))
    assert torch.equal(best_ids(hidden, weight, 0, None), (hidden @ weight.t()).argmax(-1))
    assert torch.equal(best_ids(hidden, weight, 100, None), (hidden @ weight.t()).argmax(-1) + 100)
    equal = weight[:1].expand(31, 4)
    assert not best_ids(hidden, equal, 0, None).any()
    assert best_ids(hidden[:0], weight, 0, None).shape == (0,)


def test_unknown_style_is_refused() -> None:
    config = AutoConfig.for_model(**llm_config("qwen3"))
    layer = build_llm_layers(config)[1].build().layer
    with pytest.raises(UserError, match=r"self_attn\.q_proj the style 'spiral'"):
        shard_decoder_layer(layer, tensor_sizes(config), {"self_attn.q_proj": "spiral"}, ALONE)
