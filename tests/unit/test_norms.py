"""What our norms leave to torch's."""

from __future__ import annotations

import pytest
import torch

from models import norms
from models.liger import take_kernels
from models.norms import can_norm


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.ones(3, 8), torch.ones(8)
    assert not can_norm(x, weight)  # on a CPU
    monkeypatch.setattr(norms, "take_kernels", lambda *tensors: True)
    assert can_norm(x, weight)
    assert not can_norm(x, None)
    assert not can_norm(x.bfloat16(), weight)
    assert not can_norm(x[:, :7], weight)
    assert not can_norm(x, torch.ones(8, 2)[:, 0])
    assert not can_norm(torch.ones(1, 16385), torch.ones(16385))


def test_kernels_are_for_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.liger.has_liger", lambda: True)
    assert not take_kernels(torch.ones(1))
