"""Checkpoints are copied as they are while a trainer that may be hostile writes beside, and it cannot see that they were read."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from factory.audit.keeping import copy_checkpoint
from trainer.contract.checkpoint.format import Checkpoint, find_fault, save


def made(folder: Path, step: int = 5) -> Path:
    weights = {"w": torch.arange(1000.0)}
    return save(folder, Checkpoint(weights, {"step.w": torch.ones(1)}, {"step": step}))


def facts(folder: Path) -> list[tuple[str, int, int, int]]:
    """What a trainer can see of its files: names, links, and when they were read and changed."""
    found = []
    for file in sorted(folder.iterdir()):
        status = file.stat()
        found.append((file.name, status.st_nlink, status.st_atime_ns, status.st_ctime_ns))
    return found


def test_a_copy_is_whole_and_leaves_no_trace(tmp_path: Path) -> None:
    source, target = made(tmp_path / "live"), tmp_path / "kept" / "step-00000005"
    for (
        file
    ) in source.iterdir():  # read long ago, so that even a file system of relative times would write down a reading
        os.utime(file, ns=(1, time.time_ns()))
    before = facts(source)
    copy_checkpoint(source, target)
    assert facts(source) == before
    assert not find_fault(target)
    assert {f.name: f.read_bytes() for f in target.iterdir()} == {f.name: f.read_bytes() for f in source.iterdir()}


def changed_bytes(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"x" * (folder / "model.safetensors").stat().st_size)


def linked(folder: Path) -> None:
    (folder / "state.json").unlink()
    (folder / "state.json").symlink_to("/etc/passwd")


def piped(folder: Path) -> None:
    (folder / "state.json").unlink()
    os.mkfifo(folder / "state.json")


def named_outside(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["../../../escaped"] = manifest["files"]["state.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def longer(folder: Path) -> None:
    with open(folder / "model.safetensors", "ab") as file:
        file.write(b"\0" * (1 << 20))


def nested(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 100_000)


@pytest.mark.parametrize("harm", [changed_bytes, linked, piped, named_outside, longer, nested])
def test_what_is_not_as_the_manifest_says_is_not_kept(harm, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source, target = made(tmp_path / "live"), tmp_path / "kept" / "step-00000005"
    harm(source)
    with pytest.raises((ValueError, OSError)):
        copy_checkpoint(source, target)
    assert not target.exists() and not (tmp_path / "escaped").exists()


def test_a_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    source = made(tmp_path / "elsewhere")
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / source.name).symlink_to(source)
    with pytest.raises(OSError):
        copy_checkpoint(tmp_path / "live" / source.name, tmp_path / "kept" / source.name)
    with pytest.raises(FileNotFoundError):
        copy_checkpoint(tmp_path / "live" / "step-00000010", tmp_path / "kept" / "step-00000010")
