"""Small tensors on their way from the host to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def on_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """``tensor`` on ``device``, without making the host wait for what the device still has to do.

    A copy from ordinary host memory does; one from pinned memory joins the stream, and the caching host
    allocator reuses the memory only when the copy is done.
    """
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
