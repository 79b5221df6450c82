"""The arms of a diagnosis: replays of the window in which one thing is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from agents.loss_doctor.curves import StepPoint, Symptom

# Where an arm starts: the newest checkpoint before the onset; an earlier one, from which it trains through; or the weights of an
# earlier one put where the newest stood, so that the same documents meet another state.
Start = Literal["newest", "earlier", "older weights"]


@dataclass(frozen=True)
class Arm:
    """One replay. ``name`` is unique within a diagnosis."""

    name: str
    recipe: Mapping[str, Any] = field(default_factory=dict)  # keys that differ from the segment's, with dots
    masked: tuple[str, ...] = ()  # documents whose loss weighs nothing
    reference_kernels: bool = False
    previous_commit: bool = False
    start: Start = "newest"


AGAIN = (Arm("same again"), Arm("same again, twice"))
FP32 = Arm("fp32", {"precision": "fp32"})
KERNELS = Arm("reference kernels", reference_kernels=True)
COMMIT = Arm("previous commit", previous_commit=True)
EARLIER = Arm("earlier checkpoint", start="earlier")
OLDER = "older weights"
LOWER_RATE = 0.1  # of the rate


@dataclass(frozen=True)
class ArmOutcome:
    """What a replay showed. ``fires`` None: neither there nor gone, or not run, for the reason in ``failed``."""

    arm: str
    fires: bool | None
    steps: int = 0  # replayed
    bits: str = ""  # a hash of the curve, and of weights and moments at its end
    curve: tuple[StepPoint, ...] = ()
    failed: str = ""


@dataclass(frozen=True)
class DocumentScore:
    """How one document of the window stands at a checkpoint."""

    key: str
    loss: float  # nats a supervised token
    gradient: float  # norm of the gradient of its summed loss: its part in the step's gradient


@dataclass(frozen=True)
class AnomalyCase:
    """The facts of an anomaly that no replay is needed for."""

    kind: str
    onset: int
    last: int  # the episode's last step
    symptom: Symptom
    recipe: Mapping[str, Any]
    all_reference: bool = False  # does every op already use its reference?
    has_previous_commit: bool = False
    has_earlier: bool = False  # is there a checkpoint of the segment before the newest one?
    has_older: bool = False  # is there any before it?
    resumed_at: int | None = None  # the newest checkpoint's step, if it lacks the optimiser's moments
    generation_begins: int | None = None  # step at which new shards joined, if within the window's reach


class BudgetSpent(Exception):
    """No replay may be begun: the budget in replayed steps is spent."""


class ReplayBench(Protocol):
    """All that the doctor can do."""

    def case(self) -> AnomalyCase: ...

    def run(self, arm: Arm) -> ArmOutcome:
        """Replay the window. Raises: BudgetSpent."""

    def scores(self, start: Start) -> Sequence[DocumentScore]:
        """Of every document of the window's steps, at the newest checkpoint or with the older weights."""


def rate_arms(recipe: Mapping[str, Any]) -> list[Arm]:
    """What may tame a step that the optimiser makes too large."""
    optimizer, stability = recipe["optimizer"], recipe["stability"]
    arms = [Arm("rate × 0.1", {"optimizer.lr": optimizer["lr"] * LOWER_RATE})]
    if optimizer["beta2"] > 0.95:
        arms.append(Arm("β2 0.95", {"optimizer.beta2": 0.95}))
    arms.append(Arm("clip × 0.1", {"stability.grad_clip": stability["grad_clip"] * LOWER_RATE}))
    return arms
