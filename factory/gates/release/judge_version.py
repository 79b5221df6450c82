"""Computes the hash of the code that judges a release. With the same hash, policy and evidence, the verdict is the same, word for word."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from factory.core.workspace import find_checkout_root
from factory.git.version import describe_version

# The judge and the modules that it imports, except modules that read files (``core.policy_file``) or measure (``evals.tasks``).
FILES = (
    "factory/evals/power.py",
    "factory/evals/probes/checks.py",
    "factory/evals/statistics.py",
    "factory/gates/release/evidence.py",
    "factory/gates/release/guards.py",
    "factory/gates/release/judge.py",
    "factory/gates/release/judge_messages.py",
    "factory/gates/release/overfitting.py",
    "factory/gates/release/policy.py",
    "factory/gates/release/reasons.py",
    "factory/tasks/comparing.py",
    "kernels/contract/message.py",
)


@dataclass(frozen=True)
class JudgeVersion:
    """``sha256``: the hash of ``FILES``. ``version``: the factory's version, for a person who looks for that code."""

    sha256: str
    version: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@functools.cache
def compute_judge_version() -> JudgeVersion:
    """Return the version of the judge in this checkout. The files are read at the first call in a process."""
    digest = hashlib.sha256()
    for path in sorted(FILES):
        content = (find_checkout_root() / path).read_bytes()
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
    return JudgeVersion(digest.hexdigest(), describe_version())
