"""Mesh, actions, reshard types."""

import pytest

from omni_ds.errors import UserError
from omni_ds.plan.actions import Action, Kind
from omni_ds.plan.mesh import Mesh
from omni_ds.plan.reshard import PlacedItem, Share, Window, order_share, window_transfers
from omni_ds.plan.sample import Item


def test_mesh_ranks_are_row_major_with_tensor_innermost():
    mesh = Mesh(pipe=2, data=3, sequence=2, tensor=2)
    assert mesh.world_size == 24 and mesh.data_degree == 6 and mesh.lanes == 4
    assert [mesh.rank(tensor=1), mesh.rank(sequence=1), mesh.rank(data=1), mesh.rank(pipe=1)] == [1, 2, 4, 12]
    for rank in range(24):
        assert mesh.rank(**mesh.coords(rank)._asdict()) == rank


@pytest.mark.parametrize("axis", ["pipe", "data", "sequence", "tensor"])
def test_mesh_groups_partition_the_world(axis):
    mesh = Mesh(2, 3, 2, 2)
    groups = mesh.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(24))
    for group in groups:
        assert len(group) == getattr(mesh, axis)
        assert [getattr(mesh.coords(rank), axis) for rank in group] == list(range(len(group)))


def test_mesh_encoder_and_zero_groups():
    mesh = Mesh(2, 2, 1, 2)
    assert mesh.encoder_groups() == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert mesh.zero_groups() == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_mesh_names_the_product_that_failed():
    with pytest.raises(UserError, match=r"pipe 3 x sequence 1 x tensor 2 = 6 does not divide the 8 ranks"):
        Mesh.from_world(8, pipe=3, tensor=2)
    assert Mesh.from_world(8, pipe=2, tensor=2) == Mesh(2, 2, 1, 2)


def test_actions_print_and_parse():
    printed = (
        "F3 B0 I1 W1 EF0 EB12 ER SF3>2 RF3<1 SB0>0 RB0<3 SX0>2 RX0<5 SG1>4 RG1<0 F3.1 SF3.1>10 TIED REDUCE"
    )
    for text in [*printed.split(), "NORM", "STEP"]:
        assert str(Action.parse(text)) == text
    assert Action.parse("RX0<5") == Action(Kind.RECV_X, 0, 0, 5)
    for kind in Kind:
        action = Action(kind, 4, 1, 7)
        assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "Q3", "F3>", "RX0>5", "SF3<2", "F3.0", "3F"])
def test_actions_refuse_what_they_would_not_print(text):
    with pytest.raises(ValueError):
        Action.parse(text)


def test_transfer_pieces_follow_placeholders_and_merge_neighbours():
    first = Item(7, 0, "a", (1,), (4,), 4, ((2, 4),))
    second = Item(7, 1, "a", (1,), (3,), 3, ((6, 1), (8, 2)))
    other = Item(9, 0, "b", (1,), (2,), 2, ((0, 2),))
    items = order_share(
        [PlacedItem(other, 0, 0), PlacedItem(second, 1, 10), PlacedItem(first, 1, 10)], {"a": 0, "b": 1}
    )
    assert [placed.item for placed in items] == [first, second, other]
    window = Window(3, (0, 1), (Share(0, ()), Share(5, items)))
    (transfer,) = window_transfers(window, (0,), {0: ((0, 9, 0),), 1: ((0, 40, 0),)})
    assert (transfer.source, transfer.destination, transfer.rows) == (5, 0, 9)
    pieces = [(p.micro_batch, p.source_start, p.destination_start, p.rows) for p in transfer.pieces]
    # rows 0-3 go to tokens 12-15 and row 4 to 16: one piece; 5-6 skip a token; the other encoder's rows
    # come last
    assert pieces == [(0, 7, 0, 2), (1, 0, 12, 5), (1, 5, 18, 2)]
    back = transfer.transposed()
    assert (back.source, back.destination, back.pieces, back.gradient) == (0, 5, transfer.pieces, True)
    assert back.transposed() == transfer
