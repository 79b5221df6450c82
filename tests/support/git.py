"""git as tests call it: an identity of its own, and nothing of the configuration of whoever runs them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

IDENTITY = ("user.name=t", "user.email=t@example.invalid", "core.hooksPath=/dev/null", "commit.gpgSign=false")


def git(folder: Path, *arguments: str) -> str:
    """What ``git -C folder …`` prints. An exit code other than 0 fails the test."""
    settings = [word for setting in IDENTITY for word in ("-c", setting)]
    environment = os.environ | {"GIT_CONFIG_GLOBAL": "/dev/null"}
    done = subprocess.run(
        ["git", "-C", str(folder), *settings, *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
