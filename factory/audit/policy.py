"""``policies/gates/audit.yaml``: which windows of real segments are replayed, and how far they may differ. No patch can change it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from factory.core.policy_file import Count, Share, StrictPolicy, load_policy
from factory.gates.patience import Ratio, Seconds


class AuditPolicy(StrictPolicy):
    """Every key is optional."""

    windows: Count = 3
    """A merged patch is new until so many windows agreed with the code without it."""
    share: Share = 1.0
    """Of the segments that train with a new patch, those that are audited."""
    later_share: Share = 0.1
    """Of the segments whose patches were all audited so often."""
    least: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """How far weights may always end from the replay's, and optimiser moments: a share of how far one step left out leaves it."""
    most: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """How far they may end at most, whatever the patch showed when it was judged."""
    times: Ratio = 4.0
    """Between the two, they may differ so many times as much as the patch's weights differed in the gate, for as many steps."""
    lines: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share by which a loss or a gradient's norm of metrics.jsonl may differ from the replay's."""
    wall_seconds: Seconds = 3600.0
    """Time limit of one replay; of its second try as many again, and so on."""
    tries: Count = 3
    """Of an audit whose replay failed or ran out of time."""
    again_after_seconds: Seconds = 600.0
    """Before the next try."""
    most_waiting: Count = 3
    """Audits run while nothing else is to be done; where so many wait, one runs before the next segment is planned."""

    @classmethod
    def load(cls, path: Path) -> AuditPolicy:
        """Raises: ConfigError naming the file and the key."""
        return load_policy(cls, path)
