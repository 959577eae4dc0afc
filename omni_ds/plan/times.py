"""Measured times of actions: a model that may move actions in a later step, and nothing else.

Assignments, windows and shares are decided on FLOPs alone; where the actions of a step are placed may also
follow what was measured. A model is fitted on rank 0 from durations of all ranks, broadcast, and used from a
named later step on, so every rank and every loader process plans a step with the same version, and a resumed
run with the same as an uninterrupted one.

An action takes a + sum over its kinds of tokens of (b * tokens + c * tokens^2): one kind of tokens for the
LLM, one for each encoder; tokens^2 is summed over the runs that attend to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# Units of a, b, c: nanoseconds, picoseconds per token, femtoseconds per token^2.
_UNITS = (1, 10**3, 10**6)
_SWEEPS = 400


@dataclass(frozen=True)
class Observation:
    """One measured action. key: see :func:`llm_key`, ``EF``, ``EB``. sizes: tokens, tokens^2 of each kind."""

    key: str
    sizes: tuple[int, ...]
    nanoseconds: int


def llm_key(kind: str, stage: int) -> str:
    """``F.0``: stages hold different layers, so each has its own coefficients."""
    return f"{kind}.{stage}"


@dataclass(frozen=True)
class TimeModel:
    """coefficients: key -> (a, b, c, b, c, ...) as integers in the module's units. from_step: first step that
    is planned with it."""

    from_step: int
    coefficients: Mapping[str, tuple[int, ...]]

    def predict(self, key: str, sizes: Sequence[int]) -> int:
        """Nanoseconds, at least 1."""
        a, *rest = self.coefficients[key]
        total = a * _UNITS[2]
        for i, (value, size) in enumerate(zip(rest, sizes, strict=True)):
            total += value * size * (_UNITS[2] // _UNITS[1 + i % 2])
        return max(1, total // _UNITS[2])

    def covers(self, keys: Iterable[str]) -> bool:
        return all(key in self.coefficients for key in keys)


def fit(observations: Sequence[Observation], from_step: int) -> TimeModel:
    """Non-negative least squares for each key, rounded to integers.

    Relative errors are minimised (each observation weighs 1 / duration), so that short actions count as much
    as long ones. Coordinate descent: the problems have at most a few unknowns and a few hundred rows.
    """
    by_key: dict[str, list[Observation]] = {}
    for observation in observations:
        by_key.setdefault(observation.key, []).append(observation)
    return TimeModel(from_step, {key: _fit_one(rows) for key, rows in sorted(by_key.items())})


def _fit_one(rows: Sequence[Observation]) -> tuple[int, ...]:
    unknowns = 1 + len(rows[0].sizes)
    table = [[1.0, *map(float, row.sizes)] for row in rows]
    weights = [1.0 / max(1, row.nanoseconds) for row in rows]
    scale = [max((abs(line[j]) for line in table), default=0.0) or 1.0 for j in range(unknowns)]
    scaled = [
        [x / s * w for x, s in zip(line, scale, strict=True)] for line, w in zip(table, weights, strict=True)
    ]
    gram = [[sum(line[i] * line[j] for line in scaled) for j in range(unknowns)] for i in range(unknowns)]
    # The target of every weighted row is 1: duration * weight.
    right = [sum(line[i] for line in scaled) for i in range(unknowns)]
    x = [0.0] * unknowns
    for _ in range(_SWEEPS):
        for i in range(unknowns):
            if gram[i][i] > 0:
                others = sum(gram[i][j] * x[j] for j in range(unknowns) if j != i)
                x[i] = max(0.0, (right[i] - others) / gram[i][i])
    units = (_UNITS[0], *(_UNITS[1 + i % 2] for i in range(unknowns - 1)))
    return tuple(round(value / s * unit) for value, s, unit in zip(x, scale, units, strict=True))


class TimeBook:
    """Every version of the time model of a run, oldest first."""

    def __init__(self, models: Iterable[TimeModel] = ()):
        self._models = list(models)

    @property
    def models(self) -> tuple[TimeModel, ...]:
        return tuple(self._models)

    def add(self, model: TimeModel) -> None:
        assert not self._models or model.from_step > self._models[-1].from_step
        self._models.append(model)

    def at(self, step: int) -> TimeModel | None:
        """The model that plans ``step``; None before the first."""
        valid = [model for model in self._models if model.from_step <= step]
        return valid[-1] if valid else None

    def to_json(self) -> list[dict]:
        return [{"from_step": m.from_step, "coefficients": dict(m.coefficients)} for m in self._models]

    @classmethod
    def from_json(cls, rows: Iterable[Mapping]) -> TimeBook:
        return cls(
            TimeModel(row["from_step"], {key: tuple(values) for key, values in row["coefficients"].items()})
            for row in rows
        )
