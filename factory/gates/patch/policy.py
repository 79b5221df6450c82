"""``policies/gates/patch.yaml``: how a patch is measured and what it must show. No patch can change it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from factory.core.policy_file import Count, StrictPolicy, load_policy
from factory.gates.patience import Patience, Ratio, Seconds


class OraclePolicy(StrictPolicy):
    """Every op that the patch changes, against the reference in fp64."""

    cases: list[str] = Field(default=["small", "prime", "strided", "empty"], min_length=1)
    """Names of kernels.contract.op.CASES; hostile values and fp32 are tried on the first. The recipe's own sizes are tried in the
    exploits stage."""
    wall_seconds: Seconds = 3600.0
    """Time limit of approved code's process, which makes the inputs and the truth."""
    patience: Patience = Patience()
    """Time limits of the candidate's processes, here and in the exploit checks, by what approved code took."""


class ExploitsPolicy(StrictPolicy):
    """Every op that the patch changes, called many times in one process, in the same tensors with new data."""

    calls: Annotated[int, Field(ge=4)] = 32
    """Calls of each op at small random sizes, a few more at random; every one is checked."""
    recipe_calls: Count = 4
    """Calls of each op, among the others, at the sizes of the trunk's recipe, with fewer rows: ``multiplications``."""
    long_calls: Count = 2
    """Calls of each op, among the others, at the recipe's number of tokens, with narrower matrices."""
    multiplications: Annotated[float, Field(gt=0)] = 1e9
    """Most multiplications of one forward call; larger sizes are halved until it is below."""


class IsolatedPolicy(StrictPolicy):
    """An op's new implementation against its old one, alone, on the recipe's shapes; both are approved code."""

    pairs: Count = 9
    """Timings of the old and the new implementation, one after the other."""
    min_ratio: Annotated[float, Field(gt=0)] = 1.0
    """Old time over new time that the pairs' upper quartile must reach; below it, the op is slower beyond the noise."""
    tries: Count = 3
    """Measurements at most, while an op is measured as faster or slower than itself (another program was busy)."""
    wall_seconds: Seconds = 3600.0
    """Time limit of one measurement, which runs approved code only."""


class MatrixPolicy(StrictPolicy):
    """Tiny training runs that together execute the trainer's code, of baseline and candidate, compared number by number."""

    wall_seconds: Seconds = 3600.0
    """Time limit of the runs that the baseline's code makes."""
    patience: Patience = Patience()
    """Time limits of the candidate's runs, by what the baseline's took."""


class TrainingPolicy(StrictPolicy):
    """One measurement: N steps from the trunk's last checkpoint, baseline, candidate, and both again, in the sandbox, timed from outside.

    A gain that would promote is measured a second time, with ``tries`` and ``budget_seconds`` of its own.
    """

    sequences: Annotated[int, Field(ge=0)] = 0
    """Rows of a step, for both sides; 0: the recipe's. Fewer make a verdict quicker."""
    steps: Annotated[int, Field(ge=3)] = 10
    """Of one timed run."""
    pairs: Annotated[int, Field(ge=2)] = 4
    """Timed runs of each side in a measurement, half of them in each of two processes."""
    long: Annotated[int, Field(ge=2)] = 8
    """How many times as long one more run of each side is, where new code seems to gain: a quicker start matters that much less in it."""
    wall_seconds: Seconds = 3600.0
    """Time limit of one session of the baseline: start-up, warm-up and timed runs; proportionally more with a long run."""
    patience: Patience = Patience()
    """Time limits of the candidate's sessions, by what the baseline's session before took."""
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    """One-sided, of the gain's lower bound; divided among the tries on the same target."""
    min_gain: Ratio = 1.02
    """Ratio of step times, baseline over candidate, that the lower bound must exceed."""
    max_noise: Ratio = 1.25
    """Largest ratio between two runs of the baseline; above it the machine is too noisy to judge by the wall clock."""
    tries: Count = 3
    """Measurements at most, while the baseline's own runs differ too much. The candidate's runs do not count for that."""
    budget_seconds: Seconds = 3600.0
    """Of all measurements together: another begins only if one as long as the longest so far would end in time."""
    max_drift: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """How far the candidate's weights may end from the baseline's, after the same steps on the same data: a share of how
    far the baseline itself ends when it leaves out ``left_out`` steps. Both in ‖difference‖ / ‖baseline − start‖."""

    def noise_allowed(self, measurement: int) -> float:
        """Largest ratio for measurement number 1, 2, …: it shrinks, as a noisy machine may look quiet by luck once in several."""
        return float(self.max_noise ** (1 / measurement))

    @property
    def left_out(self) -> int:
        return self.worth(self.steps)

    def worth(self, steps: int) -> int:
        """How many steps a run must leave out to gain ``min_gain``; at least one."""
        return max(1, round(steps * (1 - 1 / self.min_gain)))


class EvalsPolicy(StrictPolicy):
    """The weights that training left, of candidate and baseline, on held-out documents, by the judge's own model."""

    documents: Count = 60
    """Of a domain, at most."""
    document_bytes: Count = 2048
    """Bytes scored of one document."""
    margin: Annotated[float, Field(gt=0)] = 0.02
    """Bits per byte by which a domain may be worse: the lower bound of its gain must be above minus this."""
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    """One-sided, of all domains' bounds together."""


class PatchPolicy(StrictPolicy):
    oracle: OraclePolicy = OraclePolicy()
    exploits: ExploitsPolicy = ExploitsPolicy()
    isolated: IsolatedPolicy = IsolatedPolicy()
    matrix: MatrixPolicy = MatrixPolicy()
    training: TrainingPolicy = TrainingPolicy()
    evals: EvalsPolicy = EvalsPolicy()
    judge_again: Annotated[int, Field(ge=0)] = 2
    """How often the daemon has a patch judged again that only a time limit, or a device that is not there, held back."""
    judge_again_after_seconds: Seconds = 3600.0
    """Before each time, but where the device has come."""
    approval: Literal["manual", "automatic"] = "manual"
    """manual: a person approves a 'promote' before it is merged; the approval binds to the hash of what was judged."""

    @classmethod
    def load(cls, path: Path) -> PatchPolicy:
        return load_policy(cls, path)
