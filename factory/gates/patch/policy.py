"""``policies/gates/patch.yaml``: the measurements of a patch and their thresholds. No patch can change this policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from factory.core.policy_file import Count, StrictPolicy, load_policy
from factory.gates.time_limits import Ratio, Seconds, TimeLimits


class OraclePolicy(StrictPolicy):
    """Checks of every op that the patch changes, against the reference in fp64."""

    cases: list[str] = Field(default=["small", "prime", "strided", "empty"], min_length=1)
    """Names of kernels.contract.op.CASES. Hostile values and fp32 are tried on the first case. The exploits stage tries the recipe's own
    sizes."""
    wall_seconds: Seconds = 3600.0
    """Time limit of the process of approved code that makes the inputs and the truth."""
    patience: TimeLimits = TimeLimits()
    """Time limits of the candidate's processes, here and in the exploit checks, relative to the time of approved code."""


class ExploitsPolicy(StrictPolicy):
    """Many calls of every op that the patch changes, in one process, in the same tensors with new data."""

    calls: Annotated[int, Field(ge=4)] = 32
    """Calls of each op at small random sizes, plus a random number of more calls. Every call is checked."""
    recipe_calls: Count = 4
    """Calls of each op at the sizes of the trunk's recipe, with fewer rows (``multiplications``), mixed with the others."""
    long_calls: Count = 2
    """Calls of each op at the recipe's number of tokens, with narrower matrices, mixed with the others."""
    multiplications: Annotated[float, Field(gt=0)] = 1e9
    """The most multiplications of one forward call. Larger sizes are halved until they fit."""


class IsolatedPolicy(StrictPolicy):
    """The time of an op's new implementation against its old one, alone, on the recipe's shapes. Both are approved code."""

    pairs: Count = 9
    """Alternating timings of the old and the new implementation."""
    min_ratio: Annotated[float, Field(gt=0)] = 1.0
    """The ratio of old time to new time that the pairs' upper quartile must reach. Below, the op is slower beyond the noise."""
    tries: Count = 3
    """The most measurements, while an op measures as faster or slower than itself (another program was busy)."""
    wall_seconds: Seconds = 3600.0
    """Time limit of one measurement, which runs only approved code."""


class MatrixPolicy(StrictPolicy):
    """Tiny training runs of baseline and candidate that together execute the trainer's code, compared number by number."""

    wall_seconds: Seconds = 3600.0
    """Time limit of the baseline's runs."""
    patience: TimeLimits = TimeLimits()
    """Time limits of the candidate's runs, relative to the baseline's time."""


class TrainingPolicy(StrictPolicy):
    """One measurement: N steps from the trunk's last checkpoint, by baseline and candidate, twice each, in the sandbox, timed from outside.

    A gain that would promote is measured a second time. The second measurement has its own ``tries`` and ``budget_seconds``.
    """

    sequences: Annotated[int, Field(ge=0)] = 0
    """Rows of a step, for both sides. 0: the recipe's. Fewer rows make a verdict quicker."""
    steps: Annotated[int, Field(ge=3)] = 10
    """Steps of one timed run."""
    pairs: Annotated[int, Field(ge=2)] = 4
    """Timed runs of each side in a measurement, divided between two processes."""
    long: Annotated[int, Field(ge=2)] = 8
    """The length of one more run of each side, as a multiple of ``steps``, if new code seems to gain. A quicker start matters less in it."""
    wall_seconds: Seconds = 3600.0
    """Time limit of one session of the baseline: start-up, warm-up and timed runs. It grows in proportion with a long run."""
    patience: TimeLimits = TimeLimits()
    """Time limits of the candidate's sessions, relative to the time of the baseline's session before."""
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    """One-sided confidence of the gain's lower bound, divided among the tries on the same target."""
    min_gain: Ratio = 1.02
    """Ratio of step times, baseline over candidate, that the lower bound must exceed."""
    max_noise: Ratio = 1.25
    """Largest ratio between two runs of the baseline. Above, the machine is too noisy to judge by the wall clock."""
    tries: Count = 3
    """The most measurements, while the baseline's own runs differ too much. The candidate's runs do not count for this."""
    budget_seconds: Seconds = 3600.0
    """Time for all measurements together. Another begins only if it would end in time, were it as long as the longest so far."""
    max_drift: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The largest distance of the candidate's weights from the baseline's, after the same steps on the same data. It is a share of the
    baseline's own distance when it leaves out ``steps_left_out`` steps. Both are ‖difference‖ / ‖baseline − start‖."""

    def noise_allowed(self, measurement: int) -> float:
        """The largest ratio for measurement 1, 2, …. It shrinks, because of several measurements on a noisy machine one may look quiet by chance."""
        return float(self.max_noise ** (1 / measurement))

    @property
    def steps_left_out(self) -> int:
        return self.steps_worth_min_gain(self.steps)

    def steps_worth_min_gain(self, steps: int) -> int:
        """The number of steps that a run must leave out to gain ``min_gain``; at least one."""
        return max(1, round(steps * (1 - 1 / self.min_gain)))


class EvalsPolicy(StrictPolicy):
    """The trained weights of candidate and baseline on held-out documents, scored by the judge's own model."""

    documents: Count = 60
    """The most documents of a domain."""
    document_bytes: Count = 2048
    """The scored bytes of one document."""
    margin: Annotated[float, Field(gt=0)] = 0.02
    """The allowed loss of a domain in bits per byte: the lower bound of its gain must be above minus this."""
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    """One-sided confidence of all domains' bounds together."""


class PatchPolicy(StrictPolicy):
    oracle: OraclePolicy = OraclePolicy()
    exploits: ExploitsPolicy = ExploitsPolicy()
    isolated: IsolatedPolicy = IsolatedPolicy()
    matrix: MatrixPolicy = MatrixPolicy()
    training: TrainingPolicy = TrainingPolicy()
    evals: EvalsPolicy = EvalsPolicy()
    judge_again: Annotated[int, Field(ge=0)] = 2
    """How often the daemon judges a patch again if only a time limit, or a missing device, held it."""
    judge_again_after_seconds: Seconds = 3600.0
    """Seconds before each time. A device that has appeared ends the wait."""
    approval: Literal["manual", "automatic"] = "manual"
    """manual: a person approves a 'promote' before it is merged; the approval binds to the hash of what was judged."""

    @classmethod
    def load(cls, path: Path) -> PatchPolicy:
        return load_policy(cls, path)
