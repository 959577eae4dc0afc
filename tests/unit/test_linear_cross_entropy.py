"""Losses of a linear head in blocks, against torch's on whole logits."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks

from omni_ds.parallel import linear_cross_entropy as parts
from omni_ds.parallel.linear_cross_entropy import linear_cross_entropy

TOKENS, WIDTH, VOCABULARY = 700, 8, 613


def problem(tokens: int = TOKENS) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64)
    return hidden, weight, torch.randint(0, VOCABULARY, (tokens,)), torch.rand(tokens, dtype=torch.float64)


def expected(alike: bool = False) -> tuple[torch.Tensor, ...]:
    hidden, weight, targets, weights = problem()
    weights = torch.full_like(weights, 0.3) if alike else weights
    hidden.requires_grad_(), weight.requires_grad_()
    losses = F.cross_entropy(hidden @ weight.t(), targets, reduction="none")
    (losses * weights).sum().backward()
    return losses.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("block", [1, 300 * 613, 1 << 27])  # the first two in several blocks
def test_losses_and_gradients(block: int, alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets, weights = problem()
    hidden, weight = hidden.float().requires_grad_(), weight.float().requires_grad_()
    losses = linear_cross_entropy(hidden, weight, targets, 0, None, block)
    if alike:  # no product of the backward pass is needed
        monkeypatch.setattr(parts, "product", None)
    (losses.sum() * 0.3 if alike else (losses * weights).sum()).backward()
    for ours, theirs in zip((losses.detach(), hidden.grad, weight.grad), expected(alike), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6 * theirs.abs().max().item())


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_gradient_of_one_side(frozen: str) -> None:
    hidden, weight, targets, _ = problem()
    given = {"hidden": hidden.float(), "weight": weight.float()}
    leaf = next(given[name].requires_grad_() for name in given if name != frozen)
    (linear_cross_entropy(*given.values(), targets, 0, None).sum() * 0.3).backward()
    theirs = expected(alike=True)[1 if frozen == "weight" else 2]
    torch.testing.assert_close(leaf.grad.double(), theirs, rtol=1e-5, atol=1e-6 * theirs.abs().max().item())


def test_a_second_pass_over_the_same_graph() -> None:
    hidden, weight, targets, _ = problem()
    hidden, weight = hidden.float().requires_grad_(), weight.float().requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets, 0, None).sum()
    first, second = (torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trained", [True, False])
def test_losses_without_and_with_gradients_are_the_same(trained: bool) -> None:
    hidden, weight, targets, _ = problem()
    losses = linear_cross_entropy(hidden.float().requires_grad_(trained), weight.float(), targets, 0, None)
    whole = F.cross_entropy(hidden @ weight.t(), targets, reduction="none")
    torch.testing.assert_close(losses.detach().double(), whole, rtol=1e-5, atol=1e-6)


def test_improbable_targets() -> None:
    """Their probability is no number of fp32, their loss and its gradient are."""
    hidden = torch.full((1, 1), 1e3, requires_grad=True)
    losses = linear_cross_entropy(hidden, torch.tensor([[0.0], [-1.0]]), torch.tensor([1]), 0, None)
    losses.sum().backward()
    assert losses.item() == 1e3 and hidden.grad.item() == 1.0


def test_large_common_offsets_lose_nothing() -> None:
    hidden, weight = torch.ones(3, 1), torch.full((5, 1), 1e4)
    losses = linear_cross_entropy(hidden, weight, torch.tensor([0, 2, 4]), 0, None)
    torch.testing.assert_close(losses, torch.full((3,), 5.0).log())


def test_a_frozen_side_and_no_targets() -> None:
    hidden, weight, targets, _ = problem(0)
    weight = weight.float().requires_grad_()
    losses = linear_cross_entropy(hidden.float(), weight, targets, 0, None)
    losses.sum().backward()
    assert losses.shape == (0,) and not weight.grad.any()


def _shard() -> list[torch.Tensor]:
    hidden, weight, targets, weights = problem()
    cut, rank = 400, dist.get_rank()  # uneven parts
    mine = weight[:cut] if rank == 0 else weight[cut:]
    hidden, mine = hidden.float().requires_grad_(), mine.float().clone().requires_grad_()
    losses = linear_cross_entropy(hidden, mine, targets, cut * rank, dist.group.WORLD, 300 * 613)
    (losses * weights).sum().backward()
    return [losses.detach(), hidden.grad, mine.grad]


def test_shards_of_the_vocabulary() -> None:
    results = run_ranks(_shard, 2, timeout=60)
    losses, hidden, weight = expected()
    for ours, *_ in results:
        torch.testing.assert_close(ours.double(), losses, rtol=1e-5, atol=1e-6)
    for _, ours, _ in results:
        torch.testing.assert_close(ours.double(), hidden, rtol=1e-5, atol=1e-6 * hidden.abs().max().item())
    ours = torch.cat([grad for *_, grad in results]).double()
    torch.testing.assert_close(ours, weight, rtol=1e-5, atol=1e-6 * weight.abs().max().item())
