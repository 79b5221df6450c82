"""Checkpoints: written aside, fsynced, hashed in a manifest, renamed; verified when loaded. Never pickle.

    step-00000120/model.safetensors      fp32 weights, the model's own names
                  optimizer.safetensors  exp_avg.*, exp_avg_sq.*, step.*, and the random number generator's state
                  state.json             step, kind, recipe, sampler, detector, counters
                  manifest.json          size and SHA-256 of the three

A folder that has its name is whole: the rename is the last thing done. A writer killed before it leaves a folder that
starts with a dot, which the next writer clears away.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from trainer.errors import CheckpointError

FORMAT = 1
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]  # JSON values

    @property
    def step(self) -> int:
        return int(self.state["step"])


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was not fit to load."""

    path: str
    reason: str


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def save(parent: Path, checkpoint: Checkpoint) -> Path:
    """Write ``parent/step-…`` so that it is there whole or not at all. Raises: OSError, with nothing left behind."""
    parent.mkdir(parents=True, exist_ok=True)
    target = parent / name_of(checkpoint.step)
    aside = parent / f".writing-{target.name}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        contents = {
            "model.safetensors": safetensors_bytes(checkpoint.model),
            "optimizer.safetensors": safetensors_bytes(checkpoint.optimizer),
            "state.json": iter([json.dumps(checkpoint.state, sort_keys=True).encode()]),
        }
        files = {name: _write(aside / name, chunks) for name, chunks in contents.items()}
        manifest = {"format": FORMAT, "step": checkpoint.step, "files": files}
        _write(aside / "manifest.json", iter([json.dumps(manifest, sort_keys=True, indent=1).encode()]))
        _fsync_folder(aside)
        if target.exists():
            shutil.rmtree(target)
        os.rename(aside, target)
        _fsync_folder(parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return target


def load(path: Path) -> Checkpoint:
    """Read and verify: what is returned is what was hashed. Raises: CheckpointError naming the file and the fault."""
    manifest = read_manifest(path)
    blobs = {}
    for name in FILES:
        expected = manifest["files"].get(name)
        if expected is None:
            raise CheckpointError(f"{path}: manifest.json does not name {name}")
        try:
            blobs[name] = (path / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path / name}: {error.strerror}") from None
        if len(blobs[name]) != expected["bytes"]:
            raise CheckpointError(f"{path / name}: {len(blobs[name])} bytes, its manifest says {expected['bytes']}")
        if hashlib.sha256(blobs[name]).hexdigest() != expected["sha256"]:
            raise CheckpointError(f"{path / name}: its bytes are not those its manifest names")
    try:
        return Checkpoint(
            safetensors.torch.load(blobs["model.safetensors"]),
            safetensors.torch.load(blobs["optimizer.safetensors"]),
            json.loads(blobs["state.json"]),
        )
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_manifest(path: Path) -> dict[str, Any]:
    """Raises: CheckpointError."""
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        found = manifest["format"], {n: (f["sha256"], f["bytes"]) for n, f in manifest["files"].items()}
    except OSError as error:
        raise CheckpointError(f"{path} is no checkpoint: manifest.json: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: manifest.json is damaged: {error}") from None
    if found[0] != FORMAT:
        raise CheckpointError(f"{path}: format {found[0]}, this code reads {FORMAT}")
    return dict(manifest)


def manifest_sha256(path: Path) -> str:
    return hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()


def steps_in(parent: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a folder, oldest first."""
    found = [(int(path.name.removeprefix("step-")), path) for path in parent.glob("step-[0-9]*") if path.is_dir()]
    return sorted(found)


def newest_good(parent: Path) -> tuple[Checkpoint | None, list[Skipped]]:
    """The newest checkpoint that verifies. Those that don't are renamed ``bad-…``, out of the way."""
    skipped: list[Skipped] = []
    for _, path in reversed(steps_in(parent)):
        try:
            return load(path), skipped
        except CheckpointError as error:
            away = path.with_name(f"bad-{path.name}")
            shutil.rmtree(away, ignore_errors=True)
            path.rename(away)
            skipped.append(Skipped(str(away), str(error)))
    return None, skipped


def snapshot(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory that the next step will not change."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


class Writer:
    """Saves in a thread, one at a time, and keeps the newest ``keep``. The step pays for the snapshot only."""

    def __init__(self, parent: Path, keep: int) -> None:
        self.parent, self.keep = parent, keep
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None

    def submit(self, checkpoint: Checkpoint) -> None:
        """Waits for the save before it. Raises: what that one raised."""
        self.wait()
        self._pending = self._pool.submit(self._save, checkpoint)

    def poll(self) -> None:
        """Raises: what a finished save raised."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> Path | None:
        """The last save's folder, once it is on disk. Raises: what it raised."""
        pending, self._pending = self._pending, None
        return pending.result() if pending is not None else None

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def _save(self, checkpoint: Checkpoint) -> Path:
        path = save(self.parent, checkpoint)
        for _, old in steps_in(self.parent)[: -self.keep]:
            shutil.rmtree(old)
        return path


def safetensors_bytes(
    tensors: dict[str, Tensor], metadata: dict[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """A safetensors file, piece by piece, so that it is hashed while it is written and a full disk is an OSError.

    Format: 8 bytes little-endian header length, JSON header padded with spaces to a multiple of 8, then the tensors.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little") + encoded
    for tensor in tensors.values():
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write(path: Path, chunks: Iterator[bytes | memoryview]) -> dict[str, Any]:
    digest = hashlib.sha256()
    size = 0
    with open(path, "wb") as out:
        for chunk in chunks:
            out.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        out.flush()
        os.fsync(out.fileno())
    return {"sha256": digest.hexdigest(), "bytes": size}


def _fsync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
