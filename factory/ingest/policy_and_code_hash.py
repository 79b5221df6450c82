"""Computes a key from the data policy and the code that reads shards. A shard that could not be read is tried again when this key changes."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from factory.core.policy_file import hash_policy
from factory.core.workspace import Workspace
from factory.ingest.rules.policy import DataPolicy


def compute_policy_and_code_hash(workspace: Workspace) -> str:
    """Return a hash (16 hex digits) of the data policy's values and of the code in ``factory/ingest/``. Raises: ConfigError."""
    policy = hash_policy(DataPolicy.load(workspace.policy_path("data.yaml")))
    return hashlib.sha256(f"{policy}\0{_code()}".encode()).hexdigest()[:16]


@cache
def _code() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
