"""Which code judges a release: what decides of policy and evidence, and words the reasons. The same code says the same of them, word for word."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from factory.core.workspace import code_root
from factory.git.version import version

# The judge and what it imports, but for what reads files (``core.policy_file``) and what measures (``evals.tasks``).
FILES = (
    "factory/evals/power.py",
    "factory/evals/probes/checks.py",
    "factory/evals/statistics.py",
    "factory/gates/release/evidence.py",
    "factory/gates/release/guards.py",
    "factory/gates/release/judge.py",
    "factory/gates/release/policy.py",
    "factory/gates/release/reasons.py",
    "factory/tasks/comparing.py",
)


@dataclass(frozen=True)
class JudgedBy:
    """``sha256``: of ``FILES``; ``version``: of the factory, for a person who looks for that code."""

    sha256: str
    version: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@functools.cache
def judged_by() -> JudgedBy:
    """The judge of this process: the files as they are when it is first asked."""
    digest = hashlib.sha256()
    for path in sorted(FILES):
        content = (code_root() / path).read_bytes()
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
    return JudgedBy(digest.hexdigest(), version())
