"""``policies/retries.yaml``: how often and after how long what failed is tried again, and when a trainer counts as hung."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from factory.core.policy_file import Count, StrictPolicy, load_policy

Seconds = Annotated[float, Field(gt=0)]


class RetryPolicy(StrictPolicy):
    """Every key is optional."""

    tries: Count = 3
    """A segment is parked when its trainer died so often without a new checkpoint in between."""
    first_wait_seconds: Seconds = 10.0
    """Before what failed is tried again; twice as long after each further failure."""
    longest_wait_seconds: Seconds = 600.0
    """What such a wait grows to."""
    hung_times: Annotated[float, Field(gt=1)] = 10.0
    """A trainer hung when it made no step for so many times the usual time of a step …"""
    hung_seconds: Seconds = 300.0
    """… and for so long at least. Time in which it waited for a core does not count."""
    start_seconds: Seconds = 3600.0
    """The least time until its first step, in which it compiles; or ``hung_times`` the longest start measured here, if that is longer."""

    @classmethod
    def load(cls, path: Path) -> RetryPolicy:
        """Raises: ConfigError naming the file and the key."""
        return load_policy(cls, path)
