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
    least: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """This distance from the replay's weights and moments is always allowed. It is a share of the effect of leaving out one step."""
    most: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The largest allowed distance, however far the patch's weights were from the baseline's in the gate."""
    times: Ratio = 4.0
    """Between ``least`` and ``most``, the allowed distance is this multiple of the patch's distance in the gate, scaled to as many steps."""
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
