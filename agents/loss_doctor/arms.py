"""The arms of a diagnosis: replays of the anomaly's window, each with one thing changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from agents.loss_doctor.curves import StepMetrics, Symptom
from kernels.contract.message import CodedError

# The checkpoint that an arm starts from. ``newest``: the newest one before the onset. ``onset``: at the onset itself, left by the first replay.
# ``earlier``: an earlier one, from which the arm trains up to the window. ``older weights``: at the onset, with the weights of an earlier one, so
# that the same documents meet another state. ``end``: the newest one after the window, for scores only.
Start = Literal["newest", "onset", "earlier", "older weights", "end"]


@dataclass(frozen=True)
class ReplayArm:
    """One replay. ``name`` is unique within a diagnosis."""

    name: str
    recipe: Mapping[str, Any] = field(default_factory=dict)  # keys that differ from the segment's, with dots
    masked: tuple[str, ...] = ()  # documents whose loss weighs nothing
    reference_kernels: bool = False
    previous_commit: bool = False
    previous_environment: bool = False  # the libraries of the segment before
    previous_mixture: bool = False  # the shares of the domains that were in force before
    reshuffled: int = 0  # above 0: other documents of the same shards are next
    start: Start = "newest"


# An arm starts at the onset if its change cannot have acted before. Else (a kernel, a commit, the rate) it starts at the newest checkpoint.
AGAIN = (ReplayArm("same again", start="onset"), ReplayArm("same again, twice", start="newest"))
FP32 = ReplayArm("fp32", {"precision": "fp32"})
KERNELS = ReplayArm("reference kernels", reference_kernels=True)
COMMIT = ReplayArm("previous commit", previous_commit=True)
ENVIRONMENT = ReplayArm("previous environment", previous_environment=True)
EARLIER = ReplayArm("earlier checkpoint", start="earlier")
MIXTURE = ReplayArm("previous mixture", previous_mixture=True)
ORDER = ReplayArm("other documents", reshuffled=1, start="onset")
MICRO = "all rows at once"
AS_BEFORE = "rate as before"
OLDER = "older weights"
LOWER_RATE = 0.1  # of the rate


@dataclass(frozen=True)
class ArmOutcome:
    """The result of a replay. ``fires``: True if the anomaly is there; None if that is unclear, or if ``failed`` says why the arm did not run."""

    arm: str
    fires: bool | None
    steps: int = 0  # replayed
    bits: str = ""  # a hash of the curve, and of weights and moments at its end
    curve: tuple[StepMetrics, ...] = ()
    failed: str = ""


@dataclass(frozen=True)
class DocumentScore:
    """The loss and gradient of one document at a checkpoint."""

    key: str
    loss: float  # nats a supervised token
    gradient: float  # norm of the gradient of its summed loss: its part in the step's gradient
    tokens: int = 1  # that carry loss
    in_window: bool = True  # False: from a sample, for comparison
    joined: bool = False  # from the shards that joined last
    by_frequency: float = (
        math.inf
    )  # nats a token of a predictor that knows only the tokens' frequencies among all scored documents


@dataclass(frozen=True)
class NewShardsComparison:
    """The new shards of one domain compared with its earlier ones. This needs no replay."""

    domain: str
    documents: tuple[str, ...]  # the window's documents that belong to the new shards
    reads_like: (
        str  # the domain whose earlier documents have the most similar tokens; the same, unless labelled wrongly
    )
    supervised: float  # share of the new documents' tokens that carry loss
    supervised_before: float
    begins_alike: float = (
        1.0  # share of these documents whose loss begins after a token after which it began in earlier ones too
    )


@dataclass(frozen=True)
class AnomalyCase:
    """The facts of an anomaly that are known without a replay."""

    kind: str
    onset: int
    last: int  # the episode's last step
    symptom: Symptom
    recipe: Mapping[str, Any]
    live: tuple[StepMetrics, ...] = ()  # of the live run, from the newest checkpoint to the last step
    all_reference: bool = False  # does every op already use its reference?
    has_previous_commit: bool = False
    has_previous_environment: bool = False
    environment_changed: str = ""  # what of it differs from the segment before: 'torch 2.11 → 2.13'
    has_end: bool = False  # is there a checkpoint after the window?
    has_previous_mixture: bool = False  # did the shares of the domains change within the window's reach?
    has_earlier: bool = False  # is there a checkpoint of the segment before the newest one?
    has_older: bool = False  # is there any before it?
    resumed_at: int | None = None  # the newest checkpoint's step, if it lacks the optimiser's moments
    generation_begins: int | None = None  # step at which new shards joined, if within the window's reach
    one_rank: bool = False  # is it replayed by another number of ranks than it was trained by?
    was_otherwise: Mapping[str, Any] = field(
        default_factory=dict
    )  # keys of optimizer and schedule, as the segment before had them


class ReplayBudgetSpentError(CodedError):
    """The budget of replayed steps is spent, so no replay may begin."""


class ReplayBench(Protocol):
    """Gives the doctor the facts of an anomaly, and runs its replays."""

    def case(self) -> AnomalyCase:
        """The facts of the anomaly."""

    def run(self, arm: ReplayArm) -> ArmOutcome:
        """Replay the window. Raises: ReplayBudgetSpentError."""

    def score_documents_at(self, start: Start) -> Sequence[DocumentScore]:
        """Scores of each document of the window, and of samples of the shards that joined last and of the earlier shards."""

    def compare_new_shards(self) -> Sequence[NewShardsComparison]:
        """For each domain, the shards that joined last compared with the earlier ones; empty if none joined."""


def make_arms_with_smaller_steps(case: AnomalyCase) -> list[ReplayArm]:
    """Arms with smaller steps of the optimiser. If the optimiser's keys changed since the previous segment, the old values come first.

    A warm-up of twice the length about halves the rate at the anomaly. A longer one lowers it further.
    """
    optimizer, stability, schedule = (case.recipe[key] for key in ("optimizer", "stability", "schedule"))
    arms = [ReplayArm(AS_BEFORE, dict(case.was_otherwise))] if case.was_otherwise else []
    arms.append(ReplayArm("rate × 0.1", {"optimizer.lr": optimizer["lr"] * LOWER_RATE}))
    if case.last < 2 * max(16, schedule["warmup_steps"]):
        length = 8 * case.last
        first = max(length, schedule["trunk_steps"]["first"])
        arms.append(ReplayArm("longer warm-up", {"schedule.warmup_steps": length, "schedule.trunk_steps.first": first}))
    if optimizer["beta2"] > 0.95:
        arms.append(ReplayArm("β2 0.95", {"optimizer.beta2": 0.95}))
    arms.append(ReplayArm("clip × 0.1", {"stability.grad_clip": stability["grad_clip"] * LOWER_RATE}))
    return arms


def make_arm_without_accumulation(recipe: Mapping[str, Any]) -> ReplayArm | None:
    """The arm with the same batch without accumulation; None if the recipe does not accumulate."""
    micro = recipe["batch"].get("micro_sequences")
    return ReplayArm(MICRO, {"batch.micro_sequences": None}) if micro else None
