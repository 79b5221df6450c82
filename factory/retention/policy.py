"""``policies/retention.yaml``: what is kept for how long. What something needs is kept, whatever it says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field

from factory.core.policy_file import Count, Share, StrictPolicy, load_policy
from factory.retention.disk import FLOOR_BYTES

Days = Annotated[float, Field(ge=0)]
Number = Annotated[int, Field(ge=0)]


class RetentionPolicy(StrictPolicy):
    """Every key is optional."""

    trunk_segments: Count = 3
    """Newest finished trunk segments whose checkpoints are kept: so far back the trunk can be rewound, and averaged."""
    ladders: Number = 4
    """Newest segments whose ladders of checkpoints are kept, which a diagnosis replays from."""
    candidate_days: Days = 14.0
    """Of a candidate that was judged and not released, after its segment ended: its export, its copy in MLflow, its checkpoints."""
    rewound_days: Days = 7.0
    """Of a segment that was rewound or that another one replaced, after it was planned: its checkpoints and all that was measured in it."""
    worktrees: Number = 3
    """Newest commits that trained whose worktrees and compiled kernels are kept: either is made again where it is missing."""
    log_days: Days = 90.0
    """Of a segment's log, after the segment ended; of torchrun's logs and of exchanges with language models, after they were written."""
    run_days: Days = 180.0
    """Of a segment's run in MLflow, after the segment ended: its curves. They stay in the segment's metrics.jsonl."""
    floor_bytes: Number = FLOOR_BYTES
    """Free on the workspace's disk. With less, all goes that nothing needs, however new; where that is not enough, training waits."""
    floor_share: Share = 0.0
    """The same, as a share of the disk; the greater of the two counts."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises: ConfigError naming the file and the key."""
        return load_policy(cls, path)

    def floor(self, total: int) -> int:
        """Bytes, of a disk that has ``total``."""
        return max(self.floor_bytes, int(self.floor_share * total))

    def at_least(self) -> Self:
        """The same where room is short: only what is needed is kept, and runs of MLflow, whose store does not shrink."""
        nothing = dict.fromkeys(("ladders", "candidate_days", "rewound_days", "worktrees", "log_days"), 0)
        return self.model_copy(update={"trunk_segments": 1} | nothing)
