"""What a run left, read when it is asked for and without trust: no link is followed, what is read is bounded."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from factory.core.errors import SegmentError
from factory.core.faults import is_of_no_file
from factory.core.left_files import parse_json, read_object
from factory.runs.folders import result_of
from factory.runs.untrusted_files import UntrustedFileError, object_of, read_bytes
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.format import Checkpoint, Tensors
from trainer.contract.errors import TrainerError

LOG_BYTES = 1 << 30
JSON_BYTES = 1 << 26  # most of a checkpoint's state.json
HEADER_BYTES = 1 << 20  # of what names tensors and files

Series = list[float | None]  # a value a step; None: not finite, or not written


@dataclass(frozen=True)
class Trace:
    """The steps [first, last) of a run in ``folder``. Each part raises UntrustedFileError that says what is missing or wrong; OSError for a
    fault of the machine, which says nothing about the run."""

    folder: Path
    first: int
    last: int
    ends: bool = True  # does it end there, so that its result names its last checkpoint?
    where: Path | None = None  # its last checkpoint, where that lies elsewhere

    @property
    def checkpoint(self) -> Path:
        """Its last checkpoint."""
        return self.where or self.folder / "checkpoints" / checkpoints.name_of(self.last)

    @cached_property
    def result(self) -> dict[str, Any]:
        """result.json."""
        try:
            return result_of(self.folder, self.last)
        except SegmentError as error:
            raise UntrustedFileError(str(error)) from None

    @cached_property
    def left(self) -> Checkpoint:
        """Weights, moments and state after the last step; held as long as this trace is."""
        assert not self.ends or self.result
        return read_checkpoint(self.checkpoint, self._folders)

    @cached_property
    def lines(self) -> dict[int, dict[str, Any]]:
        """Of metrics.jsonl, by step; of a step with several the last."""
        return {line["step"]: line for line in self._lines("metrics.jsonl")}

    @cached_property
    def anomalies(self) -> list[dict[str, Any]]:
        """Of anomalies.jsonl."""
        return self._lines("anomalies.jsonl")

    def series(self, names: Sequence[str]) -> dict[str, Series]:
        """Of those of ``names`` that metrics.jsonl has: a value a step."""
        found = {}
        for name in names:
            values = {step: line.get(name) for step, line in self.lines.items()}
            kept = [values.get(step) for step in range(self.first, self.last)]
            series = [float(v) if isinstance(v, int | float) and math.isfinite(v) else None for v in kept]
            if any(value is not None for value in series):
                found[name] = series
        return found

    @cached_property
    def replicas_apart(self) -> list[str] | None:
        """The weights whose copies on its ranks differ, as the trainer says; None where it does not say."""
        names = read_object(self.folder / "result.json").get("replicas_apart")
        return [str(name)[:200] for name in names] if isinstance(names, list) else None

    @property
    def bits(self) -> str:
        """A hash of weights and moments, as the manifest has them."""
        refuse_links(self.checkpoint, self._folders)
        files = checkpoints.read_manifest(self.checkpoint)["files"]
        tensors = sorted((key, file["sha256"]) for key, file in files.items() if key != "state.json")
        return hashlib.sha256(json.dumps(tensors).encode()).hexdigest()

    @property
    def _folders(self) -> list[Path]:
        """Above its last checkpoint, those where its trainer could write."""
        return [] if self.where else [self.folder, self.folder / "checkpoints"]

    def _lines(self, name: str) -> list[dict[str, Any]]:
        return [line for line in step_lines(self.folder, name) if self.first <= line["step"] < self.last]


def read_checkpoint(path: Path, folders: Sequence[Path] = ()) -> Checkpoint:
    """One that a trainer which has ended left, whole. ``folders``: as of ``refuse_links``. Raises: UntrustedFileError; OSError for a fault of the
    machine."""
    refuse_links(path, folders)
    try:
        return checkpoints.load(path)
    except (
        TrainerError,
        OSError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        RuntimeError,
        MemoryError,
    ) as error:
        if isinstance(error, OSError) and is_of_no_file(error):
            raise
        said = str(error).replace(f"{path.parent}/", "")[:300]
        raise UntrustedFileError(f"the checkpoint {path.name} cannot be read: {said}") from None


def read_alive(folder: int, step: int, like: Tensors, aside: Path | None = None) -> Checkpoint:
    """The checkpoint of ``step`` in an opened folder whose trainer still lives, and may change any file at any moment: a private copy is read,
    which lies in ``aside`` for that long. All is in memory before any of it is written: the trainer gets no time to finish it.

    Raises: UntrustedFileError where a file is not what the manifest says, or the weights are not finite or have other names, shapes or
    dtypes than ``like``; OSError for a fault of the machine.
    """
    name, size = checkpoints.name_of(step), sum(tensor.numel() * tensor.element_size() for tensor in like.values())
    files = {
        "model.safetensors": 2 * size + HEADER_BYTES, "optimizer.safetensors": 4 * size + HEADER_BYTES, "state.json": JSON_BYTES,
        "manifest.json": HEADER_BYTES,
    }  # fmt: skip
    try:
        stored = {file: read_bytes(folder, ("checkpoints", name, file), most) for file, most in files.items()}
        with tempfile.TemporaryDirectory(dir=aside) as private:
            copy = Path(private, name)
            copy.mkdir()
            for file, content in stored.items():
                (copy / file).write_bytes(content)
            left = read_checkpoint(copy)
            held = [{key: tensor.clone() for key, tensor in part.items()} for part in (left.model, left.optimizer)]
        state = object_of(stored["state.json"], "state.json")  # more strictly than a trainer reads it
        left = replace(
            left, model=held[0], optimizer=held[1], state=state
        )  # no tensor is a view of a file that is gone
    except UntrustedFileError as error:
        raise UntrustedFileError(
            f"it left no checkpoint of step {step} that training could continue from: {error}"
        ) from None
    for key in left.model.keys() | like.keys():
        found, tensor = left.model.get(key), like.get(key)
        if found is None or tensor is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
            raise UntrustedFileError(f"its weights are not this model's ({key[:200]})")
        if not bool(found.isfinite().all()):
            raise UntrustedFileError(f"its weights are not finite ({key})")
    return left


def refuse_links(checkpoint: Path, folders: Sequence[Path] = ()) -> None:
    """Before what a trainer left is opened: are ``folders`` and the checkpoint folders, and all in it regular files? A link leads elsewhere, and
    a pipe blocks. Raises: UntrustedFileError; OSError for a fault of the machine."""
    try:
        for folder in (*folders, checkpoint):
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                raise UntrustedFileError(f"{folder.name} is not a folder")
        with os.scandir(checkpoint) as entries:
            for entry in entries:
                if not entry.is_file(follow_symlinks=False):
                    raise UntrustedFileError(f"{checkpoint.name}/{entry.name[:80]} is not a regular file")
    except FileNotFoundError:
        pass  # who opens it says so
    except OSError as error:
        if is_of_no_file(error):
            raise
        raise UntrustedFileError(f"the checkpoint {checkpoint.name} is not there: {error.strerror}") from None


def step_lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a file, each of a step; none where there is no file. Raises: UntrustedFileError; OSError for a fault of the machine."""
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UntrustedFileError(f"{folder.name} is not there: {error.strerror}") from None
    try:
        return lines_in(opened, name)
    finally:
        os.close(opened)


def lines_in(folder: int, name: str) -> list[dict[str, Any]]:
    """As ``step_lines``, of an opened folder."""
    stored = read_bytes(folder, (name,), LOG_BYTES) if name in os.listdir(folder) else b""
    found = []
    for line in stored.splitlines():
        try:
            record = parse_json(line)
        except ValueError:
            raise UntrustedFileError(f"{name} has a line that is no JSON") from None
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise UntrustedFileError(f"{name} has a line without a step")
        found.append(record)
    return found
