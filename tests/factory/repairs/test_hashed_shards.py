"""The note of hashed token shards: changed files are hashed again."""

from __future__ import annotations

import os
from pathlib import Path

from factory.core.workspace import Workspace
from factory.repairs.token_shards import VerifiedShardRecord
from trainer.contract.data.token_shard import FILES


def test_an_edit_in_place_that_keeps_size_and_time_is_noticed(tmp_path: Path) -> None:
    workspace, shard = Workspace.create(tmp_path / "workspace"), tmp_path / "0123"
    shard.mkdir()
    for name in ("manifest.json", *FILES):
        (shard / name).write_text(name)
    noted = VerifiedShardRecord(workspace)
    noted.record_verified_shards([shard])
    assert noted.is_unchanged(shard) and VerifiedShardRecord(workspace).is_unchanged(shard)
    edited, before = shard / FILES[0], (shard / FILES[0]).stat()
    with open(edited, "r+b") as file:
        file.write(b"X")
    os.utime(edited, ns=(before.st_atime_ns, before.st_mtime_ns))
    now = edited.stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    assert not noted.is_unchanged(shard)
