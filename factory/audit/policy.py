"""``policies/gates/audit.yaml``: which windows of real segments are replayed, and how far they may differ. No patch can change this policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from factory.core.policy_file import Count, Share, StrictPolicy, load_policy
from factory.gates.time_limits import Ratio, Seconds


class AuditPolicy(StrictPolicy):
    """Every key is optional."""

    windows: Count = 3
    """A merged patch is new until this many windows agreed with the code without it."""
    share: Share = 1.0
    """The audited share of the segments that train with a new patch."""
    later_share: Share = 0.1
    """The audited share of the segments that train without a new patch."""
    least: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """The distance of weights and moments from the replay's that is always allowed, as a share of the effect of leaving out one step."""
    most: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The largest allowed distance, whatever the patch showed in the gate."""
    times: Ratio = 4.0
    """Between the two, the allowed distance is this multiple of the patch's distance in the gate for as many steps."""
    lines: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """The share by which a loss or a gradient's norm in metrics.jsonl may differ from the replay's."""
    wall_seconds: Seconds = 3600.0
    """Time limit of one replay. Each further try gets this much more."""
    tries: Count = 3
    """Tries of an audit whose replay failed or ran out of time."""
    again_after_seconds: Seconds = 600.0
    """Seconds before the next try."""
    most_waiting: Count = 3
    """Audits run when no other work waits. If this many audits wait, one runs before the next segment is planned."""

    @classmethod
    def load(cls, path: Path) -> AuditPolicy:
        """Raises: ConfigError naming the file and the key."""
        return load_policy(cls, path)
