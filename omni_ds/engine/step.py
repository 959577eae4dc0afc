"""What a step takes and what it gives, on one rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from models.packed import PackedBatch
from omni_ds.engine.loss import TargetScores
from omni_ds.plan.actions import Action
from omni_ds.plan.build import StepPlan


@dataclass
class StepInput:
    """What a rank holds of one global batch.

    Attributes:
        plan: the step plan.
        batches: micro-batch -> packed tensors on the device.
        media: window -> encoder -> media of this rank's share, in share order.
        long_media: window -> what this rank's slices need of their media, in the order of its work.
        target_tokens, tokens: of the global batch, failed samples left out.
        measure: take the time of every compute action (on a GPU this waits for the device around each).
    """

    plan: StepPlan
    batches: Mapping[int, PackedBatch]
    media: Mapping[int, Mapping[str, Sequence[Tensor]]]
    target_tokens: int
    tokens: int
    measure: bool = False
    long_media: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)


@dataclass
class StepResult:
    """``loss``: mean over the ``target_tokens`` of the global batch, failed samples left out of both;
    ``grad_norm``: joint, before clipping; ``skipped``: the gradients were not finite and no weight changed;
    ``auxiliary_loss``: router losses, already weighted, not part of ``loss``;
    ``scores``: evaluation only, micro-batch -> scores of its targets (last stage); ``times``: (action,
    start ns, end ns), where a compute action of a measured step starts when its messages are there;
    ``bytes_sent``: by this rank; ``feature_bytes``: of features and their gradients, by all ranks;
    ``compute``: (compute action, ns without waiting), of measured steps; ``reduce_seconds``: this rank in
    TIED, REDUCE and ER, None on a GPU in a step that is not measured."""

    loss: float
    target_tokens: int
    auxiliary_loss: float = 0.0
    grad_norm: float = 0.0
    skipped: bool = False
    scores: dict[int, TargetScores] = field(default_factory=dict)
    times: list[tuple[Action, int, int]] = field(default_factory=list)
    compute: list[tuple[Action, int]] = field(default_factory=list)
    bytes_sent: int = 0
    feature_bytes: int = 0
    reduce_seconds: float | None = None
