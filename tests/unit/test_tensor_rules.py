"""Which heads a tensor rank serves, and which degrees are refused."""

import pytest
from transformers import AutoConfig
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig

from models.llm import build_llm_layers
from omni_ds.errors import UserError
from omni_ds.plan.tensor_rules import (
    TensorSizes,
    check_tensor_degree,
    head_share,
    largest_tensor_degree,
    layer_styles,
)
from tests.unit.model_helpers import llm_config


@pytest.mark.parametrize("kv_heads", range(1, 9))
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_query_head_once_beside_its_key_value_head(kv_heads: int, size: int) -> None:
    heads = kv_heads * size
    for degree in range(1, heads + 1):
        shares = [head_share(heads, kv_heads, degree, rank) for rank in range(degree)]
        queries = [head for share in shares for head in range(*share.query)]
        assert queries == list(range(heads))
        assert sorted(h for share in shares if share.first for h in range(*share.kv)) == list(range(kv_heads))
        for share in shares:
            assert share.query[0] < share.query[1] and share.kv[0] < share.kv[1]
            assert {head // size for head in range(*share.query)} == set(range(*share.kv))
            # attention repeats key-value heads in equal numbers
            assert (share.query[1] - share.query[0]) % (share.kv[1] - share.kv[0]) == 0
            assert share.copies == sum(set(range(*share.kv)) <= set(range(*other.kv)) for other in shares)


def test_examples() -> None:
    assert [head_share(3, 1, 2, rank).query for rank in range(2)] == [(0, 2), (2, 3)]
    assert [head_share(5, 5, 4, rank).kv for rank in range(4)] == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert [head_share(6, 3, 4, rank).kv[0] for rank in range(4)] == [0, 0, 1, 2]
    assert [head_share(4, 1, 4, rank).first for rank in range(4)] == [True, False, False, False]


def test_refusals_name_the_nearest_degree() -> None:
    sizes = TensorSizes(heads=12, kv_heads=4, intermediate=100, vocab=151)
    assert largest_tensor_degree(sizes) == 12
    for degree in (1, 2, 5, 12):
        check_tensor_degree(sizes, degree)
    with pytest.raises(UserError, match=r"autotp_size: 16 ranks .* 12 attention heads.*works is 12"):
        check_tensor_degree(sizes, 16)
    with pytest.raises(UserError, match=r"cannot share 3 vocabulary rows.*works is 3"):
        check_tensor_degree(TensorSizes(8, 8, 64, 3), 4)
    with pytest.raises(UserError, match="not a multiple"):
        check_tensor_degree(TensorSizes(6, 4, 64, 64), 2)


def test_incomplete_plans_are_completed() -> None:
    complete = layer_styles(AutoConfig.for_model("qwen3").base_model_tp_plan)
    assert layer_styles(Qwen3VLTextConfig().base_model_tp_plan) == complete
    assert layer_styles(None) == complete
    moe = layer_styles(AutoConfig.for_model("qwen3_moe").base_model_tp_plan)
    assert moe == complete  # routers and experts stay whole
    assert layer_styles({"layers.*.self_attn.q_proj": "new"})["self_attn.q_proj"] == "new"


def test_one_rank_needs_no_division() -> None:
    build_llm_layers(AutoConfig.for_model(**llm_config("qwen3", intermediate_size=1)))
