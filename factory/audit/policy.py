"""The policy of audits, ``policies/gates/audit.yaml``: how often segments are audited, and how far a replay may differ. No patch can change it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from factory.core.policy_file import Count, Share, StrictPolicy, load_policy
from factory.gates.time_limits import Ratio, Seconds


class AuditPolicy(StrictPolicy):
    """The keys of gates/audit.yaml. Every key is optional."""

    windows: Count = 3
    """A merged patch counts as new until this many audits have agreed with the code without the patch."""
    share: Share = 1.0
    """The audited share of the segments that train with a new patch."""
    later_share: Share = 0.1
    """The audited share of the segments that train without a new patch."""
    times: Ratio = 4.0
    """The allowed distance from the replay's weights and moments, as a multiple of the effect of rounding. That is the distance of another replay
    whose weights begin one rounding error off."""
    least: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """This distance from the replay's weights is always allowed. It is a share of an average step of the window."""
    most: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """If rounding allows more than this share of the way that the weights moved, the window shows too little, and the audit gives 'hold'."""
    lines: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """The share by which a loss or a gradient's norm in metrics.jsonl may differ from the replay's."""
    wall_seconds: Seconds = 3600.0
    """Time limit of one replay, in seconds. Each further try gets as many seconds more."""
    tries: Count = 3
    """How often an audit is tried if its replay fails or reaches the time limit."""
    again_after_seconds: Seconds = 600.0
    """Seconds before the next try."""
    most_waiting: Count = 3
    """Audits run when no other work waits. If this many audits wait, one runs before the next segment is planned."""

    @classmethod
    def load(cls, path: Path) -> AuditPolicy:
        """Load the policy. Raises: ConfigError naming the file and the key."""
        return load_policy(cls, path)
