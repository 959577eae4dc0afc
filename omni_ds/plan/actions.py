"""Actions: what a rank does in a step, in order. They print and parse, so that a step is a readable grid.

Compute          F3  B3  I3  W3   forward / backward / its input and weight halves of micro-batch 3
                 EF0  EB0         encoder forward / backward of window 0
Messages         SF3>2  RF3<1     activations of micro-batch 3 to rank 2 / from rank 1
                 SB3>1  RB3<2     their gradients
                 SX0>0  RX0<5     features of window 0
                 SG0>5  RG0<0     their gradients
Collectives      ER               encoder gradients (world)
                 TIED  REDUCE     tied-weight and LLM gradients (data axis)
                 NORM  STEP       joint gradient norm (world); both optimizers step
Chunk c (virtual stage, 0 unless printed) follows the index: F3.1, SF3.1>2.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """The value is the printed form."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741
    W = "W"
    EF = "EF"
    EB = "EB"
    ER = "ER"
    SEND_F = "SF"
    RECV_F = "RF"
    SEND_B = "SB"
    RECV_B = "RB"
    SEND_X = "SX"
    RECV_X = "RX"
    SEND_G = "SG"
    RECV_G = "RG"
    TIED = "TIED"
    REDUCE = "REDUCE"
    NORM = "NORM"
    STEP = "STEP"

    # Members are singletons; Enum's own hash is a Python call that hashes the name, too slow for millions
    # of look-ups.
    __hash__ = object.__hash__


LLM_COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
ENCODER_COMPUTE = frozenset({Kind.EF, Kind.EB})
COMPUTE = LLM_COMPUTE | ENCODER_COMPUTE
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B, Kind.SEND_X, Kind.SEND_G})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B, Kind.RECV_X, Kind.RECV_G})
COLLECTIVES = frozenset({Kind.ER, Kind.TIED, Kind.REDUCE, Kind.NORM, Kind.STEP})

RECEIVE_OF = {
    Kind.SEND_F: Kind.RECV_F,
    Kind.SEND_B: Kind.RECV_B,
    Kind.SEND_X: Kind.RECV_X,
    Kind.SEND_G: Kind.RECV_G,
}

_PATTERN = re.compile(r"([A-Z]+)(?:(\d+)(?:\.(\d+))?)?(?:[<>](\d+))?")


class Action(NamedTuple):
    """index: micro-batch (F B I W, SEND/RECV_F, SEND/RECV_B) or window (EF EB, SEND/RECV_X, SEND/RECV_G),
    None for collectives of the whole step. peer: global rank at the other end of a message."""

    kind: Kind
    index: int | None = None
    chunk: int = 0
    peer: int | None = None

    def __str__(self) -> str:
        text = self.kind.value
        if self.index is not None:
            text += str(self.index)
        if self.chunk:
            text += f".{self.chunk}"
        if self.peer is not None:
            text += f"{'<' if self.kind in RECEIVES else '>'}{self.peer}"
        return text

    @classmethod
    def parse(cls, text: str) -> Action:
        """Inverse of str(); ValueError when `text` is not a printed action."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"not an action: {text!r}")
        kind, index, chunk, peer = match.groups()
        action = cls(
            Kind(kind),
            None if index is None else int(index),
            0 if chunk is None else int(chunk),
            None if peer is None else int(peer),
        )
        if str(action) != text.strip():
            raise ValueError(f"not an action: {text!r}; it would print as {str(action)!r}")
        return action
