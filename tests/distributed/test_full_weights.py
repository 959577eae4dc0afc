"""Parts of parameters on several ranks: gathered whole, and saved and resumed by real engines."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

from omni_ds.plan.mesh import Mesh, group_of
from omni_ds.plan.region import Region

SHAPES = {
    "norm": (6,),
    "kv": (3, 6),
    "up": (5, 6),
    "down": (6, 5),
    "gate_up": (4, 6, 2),
    "odd": (7,),
}
GLOBAL = {"w1": "gate_up", "w2": "down", "w3": "gate_up"}


def whole(name: str, salt: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(list(SHAPES).index(name) + 100 * salt)
    return torch.randn(SHAPES[name], generator=generator)


class Layer(nn.Module):
    """Every way a layer holds parts: copies, rows, columns, and experts whose gate and up are two parameters
    with the down projection between them."""

    def __init__(self, tensor: int, tensors: int, expert: int, experts: int):
        super().__init__()

        def part(name: str, dim: int) -> Region:
            size = SHAPES[name][dim]
            bounds = [size * i // tensors for i in range(tensors + 1)]
            return Region.of(SHAPES[name], dim, bounds[tensor], bounds[tensor + 1])

        mine = (4 * expert // experts, 4 * (expert + 1) // experts)
        self._regions = {
            "norm": Region.whole(SHAPES["norm"]),
            "kv": Region.whole(SHAPES["kv"]),
            "up": part("up", 0),
            "w1": Region.of(SHAPES["gate_up"], 1, 0, 3).within(0, *mine),
            "w2": part("down", 1),
            "w3": Region.of(SHAPES["gate_up"], 1, 3, 6).within(0, *mine),
            "odd": part("odd", 0),
        }
        for local, region in self._regions.items():
            value = whole(self.hf_names()[local])[region.index].clone()
            self.register_parameter(local, nn.Parameter(value))

    def hf_names(self) -> dict[str, str]:
        return {local: GLOBAL.get(local, local) for local in self._regions}

    def regions(self) -> dict[str, Region]:
        return self._regions

    def forward(self, salt: int) -> Tensor:
        """A loss whose gradient is known."""
        named = dict(self.named_parameters())
        gradients = {
            local: whole(self.hf_names()[local], salt)[r.index] for local, r in self._regions.items()
        }
        return sum((named[local] * gradients[local]).sum() for local in named)


def _shards(mesh: Mesh) -> dist.ProcessGroup:
    group = group_of(dist.get_rank(), mesh.shard_groups())
    return dist.new_group(group, backend="gloo", use_local_synchronization=True)


def _layer(mesh: Mesh, rank: int) -> Layer:
    where = mesh.coords(rank)
    return Layer(where.tensor, mesh.tensor, where.data % mesh.expert, mesh.expert)


def _gather(mesh: Mesh) -> dict:
    from models.parameters import held_parameters
    from omni_ds.checkpoint.copies import owned_parts
    from omni_ds.checkpoint.full_weights import full_parameters

    rank, shards = dist.get_rank(), _shards(mesh)
    layer = _layer(mesh, rank)
    held = held_parameters([layer])
    # Frozen weights: rounded in the model, of another dtype as loaded.
    for h in held:
        h.parameter.requires_grad_(h.name == "up")
    originals = {
        (h.name, h.region): h.parameter.detach().half() for h in held if h.name in ("gate_up", "norm")
    }
    layer.w2.data = layer.w2.data.bfloat16()
    found = {n: t.detach().clone() for n, t in full_parameters(held, shards, originals=originals)}
    nothing = list(full_parameters(held, shards, wanted=False))
    owned = [owned_parts(held, shards, mesh, rank, sharded=sharded) for sharded in (True, False)]
    return {"found": found, "nothing": nothing, "owned": owned}


@functools.cache
def gathered() -> list[dict]:
    """Results of four ranks, tensor innermost."""
    return run_ranks(_gather, 4, Mesh(pipe=1, data=2, tensor=2, expert=2), timeout=60)


def test_parts_of_four_ranks_become_whole() -> None:
    results = gathered()
    found = results[0]["found"]
    assert list(found) == ["norm", "kv", "up", "gate_up", "down", "odd"]
    for name, value in found.items():
        expected = whole(name)
        expected = {"down": expected.bfloat16(), "norm": expected.half(), "gate_up": expected.half()}.get(
            name, expected
        )
        assert value.dtype == expected.dtype and torch.equal(value, expected), name
    assert [r["found"] for r in results[1:]] == [{}] * 3, "the first of the shard group alone"
    assert [r["nothing"] for r in results] == [[]] * 4


def test_every_part_has_one_owner() -> None:
    owned = [r["owned"] for r in gathered()]
    names = [[sorted(name for name, _ in parts) for parts in of_rank] for of_rank in owned]
    experts = ["gate_up", "gate_up"]
    # Ranks 0 and 2 are tensor rank 0 of expert rank 0 and 1; ZeRO shares out what both hold.
    first, second = sorted(["down", *experts, "kv", "norm", "odd", "up"]), ["down", "odd", "up"]
    assert [n[0] for n in names] == [first, second, first, second]
    assert [n[1] for n in names] == [first, second, experts, []]


def _engine(layer: Layer, mesh: Mesh, zero: int):
    import deepspeed

    from omni_ds.engine.encoder_ranks import EncoderRanks

    rank = dist.get_rank()
    data = dist.new_group(group_of(rank, mesh.zero_groups()), use_local_synchronization=True)
    alone = dist.new_group([rank], use_local_synchronization=True)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
    }
    groups = [
        {"params": [p for p in layer.parameters() if p.dim() > 1], "name": "llm", "weight_decay": 0.1},
        {"params": [p for p in layer.parameters() if p.dim() < 2], "name": "llm (no decay)"},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)
    engine, *_ = deepspeed.initialize(
        model=layer,
        optimizer=optimizer,
        config=config,
        mpu=EncoderRanks(data, alone),
        dist_init_required=False,
    )
    return engine


def _one_step(mesh: Mesh, zero: int, folder: str, step: int) -> dict[str, Tensor]:
    """Resume from ``step`` - 1 (fresh for 1), do a step, save, return whole weights."""
    from models.parameters import held_parameters
    from omni_ds.checkpoint import state
    from omni_ds.checkpoint.copies import in_first_shards, owned_parts
    from omni_ds.checkpoint.fragments import is_sharded
    from omni_ds.checkpoint.full_weights import full_parameters
    from omni_ds.checkpoint.layout import read_index
    from omni_ds.engine.optimizer_adapter import adapt

    rank, shards = dist.get_rank(), _shards(mesh)
    layer = _layer(mesh, rank)
    engine = _engine(layer, mesh, zero)
    held, optimizer = held_parameters([layer]), engine.optimizer
    refresh = adapt(optimizer).refresh_weights if is_sharded(optimizer) else lambda: None
    owned = owned_parts(held, shards, mesh, rank, sharded=is_sharded(optimizer))
    states = [state.EngineState("llm", optimizer, held, refresh, owned)]
    root = Path(folder)
    if step > 1:
        previous = state.find(root, None)
        state.load(previous, read_index(previous), states)
        refresh()
    engine.backward(engine(step))
    engine.step()
    group = dist.new_group(backend="gloo")
    state.save(root, step, states, {}, group, None)
    wanted = in_first_shards(mesh, rank)
    found = {n: t.detach().clone() for n, t in full_parameters(held, shards, wanted=wanted)}
    return found


TWO_BY_TWO = Mesh(pipe=1, data=2, tensor=2)


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(
            [(TWO_BY_TWO, 1), (Mesh(pipe=1, data=2), 3), (TWO_BY_TWO, 0), (Mesh(pipe=1, data=1), 2)],
            id="1302",
        ),
        pytest.param(
            [
                (TWO_BY_TWO, 3),
                (Mesh(pipe=1, data=1, tensor=3), 2),
                (Mesh(pipe=1, data=3), 1),
                (TWO_BY_TWO, 2),
            ],
            id="3212",
            marks=pytest.mark.full,
        ),
    ],
)
def test_engines_of_other_layouts_continue(layouts: list[tuple[Mesh, int]]) -> None:
    """Every step is done by a world of its own: another mesh, another ZeRO stage."""
    parameters = {name: nn.Parameter(whole(name)) for name in SHAPES}
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p.dim() < 2]},
    ]
    reference = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)
    with tempfile.TemporaryDirectory() as folder:
        for step, (mesh, zero) in enumerate(layouts, start=1):
            for name, parameter in parameters.items():
                parameter.grad = whole(name, step)
            reference.step()
            found = run_ranks(_one_step, mesh.world_size, mesh, zero, folder, step, timeout=100)[0]
            assert found.keys() == parameters.keys()
            for name, parameter in parameters.items():
                assert (found[name] - parameter).abs().max().item() < 1e-6, (step, name)
