"""git for tests, with an identity of its own and without the user's configuration."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

# With fixed dates the same files and parents give the same commit. Plants that were trained with it can be kept.
DATES = {f"GIT_{who}_DATE": "2026-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")}
IDENTITY = ("user.name=t", "user.email=t@example.invalid", "core.hooksPath=/dev/null", "commit.gpgSign=false")


def git(folder: Path, *arguments: str) -> str:
    """Return the output of ``git -C folder …``. An exit code other than 0 fails the test."""
    settings = [word for setting in IDENTITY for word in ("-c", setting)]
    environment = DATES | os.environ | {"GIT_CONFIG_GLOBAL": "/dev/null"}
    done = subprocess.run(
        ["git", "-C", str(folder), *settings, *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
