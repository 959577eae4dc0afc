"""Channels, feature reshard and agreement on real gloo ranks."""

import pytest
import torch
from ranks import RankFailure, run_ranks

from omni_ds.errors import UserError
from omni_ds.plan.mesh import Mesh
from omni_ds.plan.reshard import Piece, Transfer

HIDDEN = 3


def _groups():
    import torch.distributed as dist

    from omni_ds.engine import environment
    from omni_ds.parallel.groups import ProcessGroups

    return ProcessGroups.create(Mesh(pipe=dist.get_world_size(), data=1), environment.TIMEOUT)


def _channels(groups):
    from omni_ds.parallel.channel import Channel

    device = torch.device("cpu")
    gradients = Channel(groups.feature_gradients, device, "gradients")
    return Channel(groups.features, device, "features"), gradients


def _rows(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count * HIDDEN, dtype=torch.float32).view(count, HIDDEN) + 100 * rank


TRANSFERS = (
    # Rank 0 keeps two rows of its own; rank 1 sends three, out of order, for two micro-batches.
    Transfer(0, 0, 0, pieces=(Piece(0, 0, 4, 2),)),
    Transfer(0, 1, 0, pieces=(Piece(0, 2, 1, 1), Piece(1, 0, 0, 2))),
)


def _reshard_round_trip() -> dict[str, list]:
    import torch.distributed as dist

    from omni_ds.parallel.feature_reshard import FeatureReshard

    rank = dist.get_rank()
    features, gradients = _channels(_groups())
    reshard = FeatureReshard(TRANSFERS, rank, features, gradients, HIDDEN, torch.float32, torch.device("cpu"))
    output = _rows(rank, 2 if rank == 0 else 3)
    seen = {}
    if rank == 0:
        reshard.post(0, 1)
        reshard.keep_local(0, output)
        for micro_batch in (0, 1, 2):
            found = reshard.features_of(micro_batch)
            seen[str(micro_batch)] = None if found is None else found.tolist()
            if found is not None:
                reshard.store_gradient(micro_batch, found * 2)
        reshard.send_gradient(0, 1)
    else:
        reshard.send(0, 0, output)
        reshard.post_gradient(0, 0)
    seen["gradient"] = reshard.gradient_of(0, output.shape[0]).tolist()
    seen["bytes"] = [features.bytes_sent, gradients.bytes_sent]
    features.flush()
    gradients.flush()
    return seen


def test_features_arrive_in_packed_order_and_gradients_return_to_their_rows() -> None:
    first, second = run_ranks(_reshard_round_trip, 2, timeout=60)
    own, other = _rows(0, 2), _rows(1, 3)
    assert first["0"] == torch.cat([other[2:3], own]).tolist()
    assert first["1"] == other[:2].tolist()
    assert first["2"] is None
    assert first["gradient"] == (own * 2).tolist()
    assert second["gradient"] == (other * 2).tolist()
    row = HIDDEN * 4
    assert first["bytes"] == [0, 3 * row]
    assert second["bytes"] == [3 * row, 0]


def _error_on_one_rank() -> str:
    import torch.distributed as dist

    from omni_ds.parallel.agreement import all_or_error

    def work() -> int:
        if dist.get_rank() == 1:
            raise UserError("no such file")
        return 1

    try:
        all_or_error(work, _groups().control)
    except UserError as error:
        return str(error)
    return "no error"


def test_an_error_of_one_rank_reaches_all() -> None:
    assert run_ranks(_error_on_one_rank, 2, timeout=60) == ["no such file"] * 2


def _hang_on_rank_1() -> None:
    import time

    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(60)


def test_a_hung_rank_is_named_with_its_stack() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 hung[\s\S]*_hang_on_rank_1"):
        run_ranks(_hang_on_rank_1, 2, timeout=8)
