"""Point-to-point messages of one kind in one direction.

A receive is posted before the data is needed and waited for where it is consumed; a send returns at once
and its buffer lives until the transfer is complete. Shapes come from the plan, so nothing but the data
itself crosses the wire.
"""

from collections.abc import Hashable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Channel:
    """Keyed asynchronous messages on one process group.

    Args:
        group: the group that carries nothing but this channel's messages.
        device: where receive buffers are allocated.
        name: used in error messages.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, name: str):
        self._group = group
        self._device = device
        self._name = name
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self._receiving: dict[Hashable, tuple[dist.Work | None, Tensor]] = {}
        self.bytes_sent = 0

    def send(self, tensor: Tensor, peer: int) -> None:
        """Start sending ``tensor`` to global rank ``peer``; an empty tensor is not sent."""
        if tensor.numel() == 0:
            return
        tensor = tensor.detach().contiguous()
        self._sending = [pending for pending in self._sending if not pending[0].is_completed()]
        self._sending.append((dist.isend(tensor, peer, group=self._group), tensor))
        self.bytes_sent += tensor.numel() * tensor.element_size()

    def post(self, key: Hashable, shape: tuple[int, ...], dtype: torch.dtype, peer: int) -> None:
        """Post the receive of a message of a known shape under ``key``."""
        assert key not in self._receiving, f"{self._name}: receive {key} posted twice"
        buffer = torch.empty(shape, dtype=dtype, device=self._device)
        work = dist.irecv(buffer, peer, group=self._group) if buffer.numel() else None
        self._receiving[key] = (work, buffer)

    def wait(self, key: Hashable) -> Tensor:
        """The message posted under ``key``, complete."""
        assert key in self._receiving, f"{self._name}: receive {key} was never posted"
        work, buffer = self._receiving.pop(key)
        if work is not None:
            work.wait()
        return buffer

    def flush(self) -> None:
        """Wait for every send; called once a step, when all peers have consumed their messages."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()
        assert not self._receiving, f"{self._name}: never consumed: {sorted(map(str, self._receiving))}"
