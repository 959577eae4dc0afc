"""Feature reshard: rows leave the encoder rank that made them and arrive where the LLM needs them.

The plan's :class:`~omni_ds.plan.reshard.Transfer` says which rows of a source's window output go to which
packed token positions of which micro-batch. Forward, a source sends one message per window and destination:
its pieces, concatenated in order. Backward runs the transposed transfer: the destination returns the
gradients of the same rows in the same order. A transfer from a rank to itself is a local copy.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from omni_ds.parallel.channel import Channel
from omni_ds.plan.reshard import Transfer


class FeatureReshard:
    """Moves the features of one step of one DP replica, and their gradients back.

    Args:
        transfers: the replica's transfers of this step.
        rank: global rank of this process.
        features: channel encoder rank -> stage.
        gradients: channel stage -> encoder rank.
        width: of a feature row (Plan.row_width).
        dtype: dtype of features and of their gradients.
        device: device of this rank.
    """

    def __init__(
        self,
        transfers: Iterable[Transfer],
        rank: int,
        features: Channel,
        gradients: Channel,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._features, self._gradients = features, gradients
        self._width, self._dtype, self._device = width, dtype, device
        self._rank = rank
        self._outgoing = {(t.window, t.destination): t for t in transfers if t.source == rank}
        self._incoming = {(t.window, t.source): t for t in transfers if t.destination == rank}
        self._messages: dict[tuple[int, int], Tensor] = {}
        # Gradients of received rows, [rows, width], one entry per (window, source); filled piece by piece.
        self._returning: dict[tuple[int, int], Tensor] = {}
        # Micro-batches that still read a received message; it is freed after the last one.
        self._consumers = {key: {p.micro_batch for p in t.pieces} for key, t in self._incoming.items()}

    def keep_local(self, window: int, output: Tensor) -> None:
        """Keep the rows this rank made for itself. ``output``: [rows, width] of the window."""
        transfer = self._outgoing.get((window, self._rank))
        if transfer is not None:
            self._messages[window, self._rank] = _gather(output, transfer)

    def receivers(self, window: int) -> int:
        """How many other ranks need rows that this rank makes in ``window``."""
        return sum(of == window and to != self._rank for of, to in self._outgoing)

    def send(self, window: int, destination: int, output: Tensor) -> None:
        """Send the rows of ``output`` [rows, width] that ``destination`` needs."""
        self._features.send(_gather(output, self._outgoing[window, destination]), destination)

    def post(self, window: int, source: int) -> None:
        """Post the receive of the rows that ``source`` makes for this rank."""
        rows = self._incoming[window, source].rows
        self._features.post((window, source), (rows, self._width), self._dtype, source)

    def features_of(self, micro_batch: int) -> Tensor | None:
        """Feature rows of one micro-batch in packed order, [rows, width], or None if it has no media."""
        found: list[tuple[int, Tensor]] = []
        for key, _, offset, piece in self._pieces(micro_batch):
            if key not in self._messages:
                self._messages[key] = self._features.wait(key)
            found.append((piece.destination_start, self._messages[key][offset : offset + piece.rows]))
        if not found:
            return None
        features = torch.cat([rows for _, rows in sorted(found, key=lambda entry: entry[0])])
        for key, consumers in self._consumers.items():
            consumers.discard(micro_batch)
            if not consumers:
                self._messages.pop(key, None)
        return features

    def store_gradient(self, micro_batch: int, gradient: Tensor) -> None:
        """Keep the gradient of :meth:`features_of`, same shape and row order, until it is returned."""
        pieces = sorted(self._pieces(micro_batch), key=lambda entry: entry[3].destination_start)
        start = 0
        for key, transfer, offset, piece in pieces:
            if key not in self._returning:
                self._returning[key] = torch.zeros(
                    (transfer.rows, self._width), dtype=self._dtype, device=self._device
                )
            self._returning[key][offset : offset + piece.rows] = gradient[start : start + piece.rows]
            start += piece.rows
        assert start == gradient.shape[0], "feature gradient rows do not match the planned transfer"

    def send_gradient(self, window: int, source: int) -> None:
        """Return the gradients of the rows received from ``source``."""
        self._gradients.send(self._take_returning(window, source), source)

    def post_gradient(self, window: int, destination: int) -> None:
        """Post the receive of the gradients of the rows sent to ``destination``."""
        rows = self._outgoing[window, destination].rows
        self._gradients.post((window, destination), (rows, self._width), self._dtype, destination)

    def gradient_of(self, window: int, rows: int) -> Tensor:
        """Gradient of this rank's window output, [rows, width]; rows nobody consumed are zero."""
        gradient = torch.zeros((rows, self._width), dtype=self._dtype, device=self._device)
        for (of_window, destination), transfer in self._outgoing.items():
            if of_window != window:
                continue
            if destination == self._rank:
                message = self._take_returning(window, self._rank)
            else:
                message = self._gradients.wait((window, destination))
            start = 0
            for piece in transfer.pieces:
                rows_of_piece = message[start : start + piece.rows]
                gradient[piece.source_start : piece.source_start + piece.rows] += rows_of_piece
                start += piece.rows
        return gradient

    def _take_returning(self, window: int, source: int) -> Tensor:
        stored = self._returning.pop((window, source), None)
        if stored is None:  # the LLM did not depend on these rows (no target behind them)
            rows = self._incoming[window, source].rows
            stored = torch.zeros((rows, self._width), dtype=self._dtype, device=self._device)
        return stored

    def _pieces(self, micro_batch: int):
        for key, transfer in self._incoming.items():
            offset = 0
            for piece in transfer.pieces:
                if piece.micro_batch == micro_batch:
                    yield key, transfer, offset, piece
                offset += piece.rows


def _gather(output: Tensor, transfer: Transfer) -> Tensor:
    pieces = [output[p.source_start : p.source_start + p.rows] for p in transfer.pieces]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).detach()
