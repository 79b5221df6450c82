"""Reads ``policies/retention.yaml``: how long files are kept. Files that pending work needs are kept longer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field

from factory.core.policy_file import Count, Share, StrictPolicy, load_policy
from factory.retention.disk import FLOOR_BYTES

Days = Annotated[float, Field(ge=0)]
Number = Annotated[int, Field(ge=0)]


class RetentionPolicy(StrictPolicy):
    """The keys of ``policies/retention.yaml``. Every key is optional."""

    trunk_segments: Count = 3
    """How many of the newest finished trunk segments keep their checkpoints. The trunk can be rewound to these segments, and they can be averaged."""
    ladders: Number = 4
    """How many of the newest segments keep their ladders of checkpoints, from which a diagnosis replays."""
    candidate_days: Days = 14.0
    """For how many days after the end of its segment a judged, unreleased candidate keeps its export, its copy in MLflow and its checkpoints."""
    rewound_days: Days = 7.0
    """For how many days after its end (its planning, if it never ended) a rewound or replaced segment keeps its checkpoints and measurements."""
    worktrees: Number = 3
    """How many of the newest trained commits keep their worktrees and compiled kernels. Both can be made again."""
    log_days: Days = 90.0
    """For how many days logs are kept: a segment's log after the segment's end, torchrun's logs and exchanges with language models after they
    were written."""
    run_days: Days = 180.0
    """For how many days after the segment's end its run with its curves stays in MLflow. metrics.jsonl keeps the curves."""
    floor_bytes: Number = FLOOR_BYTES
    """The least free space on the workspace's disk, in bytes. Below it, all unneeded files are removed. If that is not enough, training waits."""
    floor_share: Share = 0.0
    """The least free space as a share of the disk. The larger of ``floor_bytes`` and this share is the floor."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the policy. Raises: ConfigError that names the file and the key."""
        return load_policy(cls, path)

    def compute_free_space_floor(self, total: int) -> int:
        """Return the floor in bytes for a disk of ``total`` bytes."""
        return max(self.floor_bytes, int(self.floor_share * total))

    def make_low_disk_policy(self) -> Self:
        """Return the policy for a disk that is almost full: it keeps only needed files, and the runs in MLflow (their removal frees no space)."""
        nothing = dict.fromkeys(("ladders", "candidate_days", "rewound_days", "worktrees", "log_days"), 0)
        return self.model_copy(update={"trunk_segments": 1} | nothing)
