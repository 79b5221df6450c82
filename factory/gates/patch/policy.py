"""``policies/gates/patch.yaml``: the measurements of a patch and their thresholds. No patch can change this policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from factory.core.policy_file import Count, StrictPolicy, load_policy
from factory.gates.time_limits import Ratio, Seconds, TimeLimits

FORMER_TRAINING_KEYS = ("max_noise", "tries")


class OraclePolicy(StrictPolicy):
    """The checks of every op that the patch changes, against the reference in fp64."""

    cases: list[str] = Field(default=["small", "prime", "strided", "empty"], min_length=1)
    """Names of cases in kernels.contract.op.CASES. Hostile values and fp32 are tried on the first case only. The recipe's own sizes are tried by the
    exploits stage."""
    wall_seconds: Seconds = 3600.0
    """Time limit of the process of approved code that makes the inputs and the truth."""
    patience: TimeLimits = TimeLimits()
    """Time limits of the candidate's processes, here and in the exploit checks, relative to the time of approved code."""


class ExploitsPolicy(StrictPolicy):
    """Many calls of every op that the patch changes: in one process, with new data in the same tensors."""

    calls: Annotated[int, Field(ge=4)] = 32
    """Calls of each op at small random sizes. A random number of calls, at most a quarter, is added. Every call is checked."""
    recipe_calls: Count = 4
    """Calls of each op at the sizes of the trunk's recipe, with fewer rows (``multiplications``), mixed with the others."""
    long_calls: Count = 2
    """Calls of each op at the recipe's number of tokens, with narrower matrices, mixed with the others."""
    multiplications: Annotated[float, Field(gt=0)] = 1e9
    """The most multiplications of one forward call. Sizes are halved until the call needs no more."""


class IsolatedTimingPolicy(StrictPolicy):
    """The timing of an op by itself, on the recipe's shapes: its new implementation against its old one. Both are approved code."""

    pairs: Count = 9
    """Pairs of timings. The old and the new implementation alternate."""
    min_ratio: Annotated[float, Field(gt=0)] = 1.0
    """The ratio of old time to new time that the upper quartile of the pairs must reach. Below it, the op is slower by more than the noise."""
    tries: Count = 3
    """The most measurements. An op is measured again if it seems faster or slower than itself, because another program was busy."""
    wall_seconds: Seconds = 3600.0
    """Time limit of one measurement, which runs only approved code."""


class MatrixPolicy(StrictPolicy):
    """Tiny training runs of baseline and candidate. Together they execute the trainer's code. Their results are compared number by number."""

    wall_seconds: Seconds = 3600.0
    """Time limit of the baseline's runs."""
    patience: TimeLimits = TimeLimits()
    """Time limits of the candidate's runs, relative to the baseline's time."""


class TrainingPolicy(StrictPolicy):
    """A measurement of training steps from the trunk's last checkpoint: rounds of runs of baseline and candidate in the sandbox, timed from outside.

    A round has a new process of each side, and pairs of runs on the same data, one run of each side in turn. Rounds are added until the gain is clear
    or the time is used.
    """

    sequences: Annotated[int, Field(ge=0)] = 0
    """Rows of a step, for both sides. 0: the recipe's. Fewer rows make a verdict quicker."""
    steps: Annotated[int, Field(ge=3)] = 10
    """Steps of one timed run."""
    pairs: Annotated[int, Field(ge=2)] = 4
    """Pairs of timed runs in a round."""
    rounds: Annotated[int, Field(ge=2)] = 2
    """The fewest rounds of a measurement. One process can be faster than another by its place in memory alone."""
    budget_seconds: Seconds = 3600.0
    """Time for all rounds. Another round begins only if it would end in time, taking as long as the longest one so far. A gain that is not clear then
    is judged again later (``judge_again``)."""
    long: Annotated[int, Field(ge=2)] = 8
    """If new code seems to gain, each side also makes a run in each later round that is ``long`` times as long: a quicker start matters less."""
    wall_seconds: Seconds = 3600.0
    """Time limit of one run of the baseline, with its start-up. A run of more steps has a limit that is longer in proportion."""
    patience: TimeLimits = TimeLimits()
    """Time limits of the candidate's runs, relative to the time of the baseline's longest run."""
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    """The probability that the interval of the gain contains the true gain at every moment of a measurement. The rest is divided among the tries on
    the same target."""
    min_gain: Ratio = 1.02
    """Ratio of step times, baseline over candidate. A patch is promoted if the whole interval is above it, and rejected if the interval is below."""
    max_drift: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The largest distance of the candidate's weights from the baseline's, after the same steps on the same data. The unit is the distance of a
    baseline run that leaves out ``left_out_step_count`` steps. Both distances are ‖difference‖ / ‖baseline − start‖."""

    @model_validator(mode="before")
    @classmethod
    def _drop_former_keys(cls, given: object) -> object:
        """Files from before December 2026 may have keys for which there is no use any more: rounds are added instead."""
        if isinstance(given, dict):
            return {key: value for key, value in given.items() if key not in FORMER_TRAINING_KEYS}
        return given

    @property
    def left_out_step_count(self) -> int:
        return self.count_steps_to_leave_out_for_min_gain(self.steps)

    def count_steps_to_leave_out_for_min_gain(self, steps: int) -> int:
        """Return the number of steps, at least one, that a run of ``steps`` must leave out to gain ``min_gain``."""
        return max(1, round(steps * (1 - 1 / self.min_gain)))


class EvalsPolicy(StrictPolicy):
    """The comparison of the trained weights of candidate and baseline on held-out documents. The judge's own model scores them."""

    documents: Count = 60
    """The most documents per domain."""
    document_bytes: Count = 2048
    """The most scored bytes of one document."""
    margin: Annotated[float, Field(gt=0)] = 0.02
    """The allowed loss of a domain in bits per byte: the lower bound of the domain's gain must be above −margin."""
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    """One-sided confidence that all domains' bounds share."""


class PatchPolicy(StrictPolicy):
    oracle: OraclePolicy = OraclePolicy()
    exploits: ExploitsPolicy = ExploitsPolicy()
    isolated: IsolatedTimingPolicy = IsolatedTimingPolicy()
    matrix: MatrixPolicy = MatrixPolicy()
    training: TrainingPolicy = TrainingPolicy()
    evals: EvalsPolicy = EvalsPolicy()
    judge_again: Annotated[int, Field(ge=0)] = 2
    """How often the daemon judges a patch again that was held only by noise, a time limit or a missing device. Failed judgements count."""
    judge_again_after_seconds: Seconds = 3600.0
    """Seconds that the daemon waits before the first of these times. Each further wait is four times as long. A missing device that appears ends
    the wait."""
    quiet_load: Annotated[float, Field(gt=0)] = 0.25
    """The daemon judges held patches again only while the load average of the last minute, per core, is below this, or in the hours of
    ``improve.night`` in agents.yaml."""
    approval: Literal["manual", "automatic"] = "manual"
    """manual: a person approves a promoted patch before it is merged. The approval is for the hash of the judged patch."""

    @classmethod
    def load(cls, path: Path) -> PatchPolicy:
        return load_policy(cls, path)
