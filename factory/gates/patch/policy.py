"""``policies/gates/patch.yaml``: the measurements of a patch and their thresholds. No patch can change this policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from factory.core.policy_file import Count, StrictPolicy, load_policy
from factory.gates.time_limits import Ratio, Seconds, TimeLimits


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
    """A measurement of training steps from the trunk's last checkpoint: two sandboxed sessions each of baseline and candidate, timed from outside.

    A gain that would promote is measured a second time. The second measurement has its own ``tries`` and ``budget_seconds``.
    """

    sequences: Annotated[int, Field(ge=0)] = 0
    """Rows of a step, for both sides. 0: the recipe's. Fewer rows make a verdict quicker."""
    steps: Annotated[int, Field(ge=3)] = 10
    """Steps of one timed run."""
    pairs: Annotated[int, Field(ge=2)] = 4
    """Timed runs of each side in a measurement, divided between two processes."""
    long: Annotated[int, Field(ge=2)] = 8
    """If new code seems to gain, each side makes one more run, ``long`` times as long. A quicker start matters less in a long run."""
    wall_seconds: Seconds = 3600.0
    """Time limit of a baseline session: start-up, warm-up and timed runs. A session with a long run has a limit that is longer in proportion."""
    patience: TimeLimits = TimeLimits()
    """Time limits of the candidate's sessions, relative to the time of the baseline's previous session."""
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    """One-sided confidence of the gain's lower bound, divided among the tries on the same target."""
    min_gain: Ratio = 1.02
    """Ratio of step times, baseline over candidate, that the lower bound must exceed."""
    max_noise: Ratio = 1.25
    """Largest ratio between the times of two baseline runs. Above it, the machine is too noisy to judge by the wall clock."""
    tries: Count = 3
    """The most measurements. A measurement is repeated if the baseline's own runs differ too much. The candidate's runs do not count for this."""
    budget_seconds: Seconds = 3600.0
    """Time for all measurements together. Another measurement begins only if it would end in time, taking as long as the longest one so far."""
    max_drift: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The largest distance of the candidate's weights from the baseline's, after the same steps on the same data. The unit is the distance of a
    baseline run that leaves out ``left_out_step_count`` steps. Both distances are ‖difference‖ / ‖baseline − start‖."""

    def compute_allowed_noise(self, measurement: int) -> float:
        """Return the allowed noise of a measurement (1, 2, …). It shrinks: one of several measurements may look quiet by chance."""
        return float(self.max_noise ** (1 / measurement))

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
