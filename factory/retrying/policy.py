"""Reads ``policies/retries.yaml``: number of tries, waits between tries, and when a trainer counts as hung."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from factory.core.policy_file import Count, StrictPolicy, load_policy

PositiveSeconds = Annotated[float, Field(gt=0)]


class RetryPolicy(StrictPolicy):
    """The keys of ``policies/retries.yaml``. Every key is optional."""

    tries: Count = 3
    """The factory parks a segment after this number of deaths of its trainer without a new checkpoint between them."""
    first_wait_seconds: PositiveSeconds = 10.0
    """The wait before the first retry. It doubles with each further failure."""
    longest_wait_seconds: PositiveSeconds = 600.0
    """The longest wait before a retry."""
    hung_times: Annotated[float, Field(gt=1)] = 10.0
    """A trainer counts as hung after this many times the usual time of a step without a step, but not before ``hung_seconds``."""
    hung_seconds: PositiveSeconds = 300.0
    """The least time without a step before a trainer counts as hung. Time in which it waits for a core does not count."""
    start_seconds: PositiveSeconds = 3600.0
    """How long the first step, which includes compiling, may take. If ``hung_times`` the longest measured start is longer, that is used."""

    @classmethod
    def load(cls, path: Path) -> RetryPolicy:
        """Raises: ConfigError naming the file and the key."""
        return load_policy(cls, path)
