"""Reads the files of a run when they are needed, as untrusted files: no link is followed, and sizes are limited."""

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
from factory.core.faults import is_machine_fault_unrelated_to_files
from factory.core.untrusted_trainer_files import LinesMemory, iterate_lines, parse_json, read_json_object
from factory.runs.trainer_folder import read_result
from factory.runs.untrusted_files import (
    UntrustedFileError,
    make_missing_file_error,
    make_not_regular_file_error,
    make_unreadable_file_error,
    open_untrusted_file,
    parse_untrusted_json_object,
    read_bytes,
)
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.format import Checkpoint, Tensors
from trainer.contract.errors import TrainerError
from trainer.contract.lora import AdaptRecipe, merge_lora

LOG_BYTES = 1 << 28
JSON_BYTES = 1 << 24  # the largest state.json of a checkpoint
HEADER_BYTES = 1 << 20  # the largest header with names of tensors and files

Series = list[float | None]  # a value per step; None: not finite, or missing


@dataclass(frozen=True)
class RunTrace:
    """The steps [first, last) of a run in ``folder``.

    Each property raises UntrustedFileError for a missing or wrong file, and OSError for a fault of the machine, which says nothing about the run.
    """

    folder: Path
    first: int
    last: int
    ends: bool = True  # the run ends at ``last``, so its result names the last checkpoint
    where: Path | None = None  # the last checkpoint, if it is elsewhere

    @property
    def final_checkpoint_path(self) -> Path:
        """The path of the last checkpoint."""
        return self.where or self.folder / "checkpoints" / checkpoints.format_checkpoint_name(self.last)

    @cached_property
    def result(self) -> dict[str, Any]:
        """The content of result.json."""
        try:
            return read_result(self.folder, self.last)
        except SegmentError as error:
            raise UntrustedFileError(error.message) from None

    @cached_property
    def final_checkpoint(self) -> Checkpoint:
        """Weights, moments and state after the last step, held in memory with this trace."""
        assert not self.ends or self.result
        return read_checkpoint(self.final_checkpoint_path, self._folders)

    @cached_property
    def metric_lines_by_step(self) -> dict[int, dict[str, Any]]:
        """The lines of metrics.jsonl by step. If a step has several lines, the last one."""
        return {line["step"]: line for line in self._lines("metrics.jsonl")}

    @cached_property
    def anomalies(self) -> list[dict[str, Any]]:
        """The lines of anomalies.jsonl."""
        return self._lines("anomalies.jsonl")

    def collect_metric_series(self, names: Sequence[str]) -> dict[str, Series]:
        """Return the values per step of each metric of ``names`` that occurs in metrics.jsonl."""
        found = {}
        for name in names:
            values = {step: line.get(name) for step, line in self.metric_lines_by_step.items()}
            kept = [values.get(step) for step in range(self.first, self.last)]
            series = [float(v) if isinstance(v, int | float) and math.isfinite(v) else None for v in kept]
            if any(value is not None for value in series):
                found[name] = series
        return found

    @cached_property
    def weights_differing_between_ranks(self) -> list[str] | None:
        """The weights whose copies on the ranks differ, as the trainer reports; None if it does not report them."""
        names = read_json_object(self.folder / "result.json").get("replicas_apart")
        return [str(name)[:200] for name in names] if isinstance(names, list) else None

    @property
    def final_checkpoint_hash(self) -> str:
        """A hash of weights and moments, from the manifest."""
        refuse_links_in_checkpoint(self.final_checkpoint_path, self._folders)
        files = checkpoints.read_manifest(self.final_checkpoint_path)["files"]
        tensors = sorted((key, file["sha256"]) for key, file in files.items() if key != "state.json")
        return hashlib.sha256(json.dumps(tensors).encode()).hexdigest()

    @property
    def _folders(self) -> list[Path]:
        """The folders above the last checkpoint in which the trainer could write."""
        return [] if self.where else [self.folder, self.folder / "checkpoints"]

    def _lines(self, name: str) -> list[dict[str, Any]]:
        return [line for line in read_step_lines(self.folder, name) if self.first <= line["step"] < self.last]


def read_checkpoint(path: Path, folders: Sequence[Path] = ()) -> Checkpoint:
    """Return a complete checkpoint of a trainer that has ended. ``folders``: as for ``refuse_links_in_checkpoint``.

    Raises: UntrustedFileError; OSError for a fault of the machine.
    """
    refuse_links_in_checkpoint(path, folders)
    try:
        return checkpoints.load_checkpoint(path)
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
        if isinstance(error, OSError) and is_machine_fault_unrelated_to_files(error):
            raise
        said = str(error).replace(f"{path.parent}/", "")[:300]
        raise UntrustedFileError(
            "runs.checkpoint_unreadable",
            "the checkpoint {checkpoint} cannot be read: {error}",
            checkpoint=path.name, error=said,
        ) from None  # fmt: skip


def read_live_checkpoint(folder: int, step: int, expected: Tensors, copy_folder: Path | None = None) -> Checkpoint:
    """Return the checkpoint of ``step`` from an opened folder while its trainer still runs and may change any file at any time.

    All files are read into memory at once, then written to a private copy in ``copy_folder``, and loaded from that copy. So the trainer gains no
    time to complete them.

    Raises: UntrustedFileError if a file differs from the manifest, or if the weights are not finite or have other names, shapes or dtypes than
    ``expected``; OSError for a fault of the machine.
    """
    name, size = (
        checkpoints.format_checkpoint_name(step),
        sum(tensor.numel() * tensor.element_size() for tensor in expected.values()),
    )
    files = {
        "model.safetensors": 2 * size + HEADER_BYTES, "optimizer.safetensors": 4 * size + HEADER_BYTES, "state.json": JSON_BYTES,
        "manifest.json": HEADER_BYTES,
    }  # fmt: skip
    try:
        stored = {file: read_bytes(folder, ("checkpoints", name, file), most) for file, most in files.items()}
        with tempfile.TemporaryDirectory(dir=copy_folder) as private:
            copy = Path(private, name)
            copy.mkdir()
            for file, content in stored.items():
                (copy / file).write_bytes(content)
            left = read_checkpoint(copy)
            held = [{key: tensor.clone() for key, tensor in part.items()} for part in (left.model, left.optimizer)]
        state = parse_untrusted_json_object(
            stored["state.json"], "state.json"
        )  # parsed more strictly than a trainer parses it
        left = replace(
            left, model=held[0], optimizer=held[1], state=state
        )  # cloned, so that no tensor is a view of a deleted file
    except UntrustedFileError as error:
        raise UntrustedFileError(
            "runs.no_checkpoint",
            "the run left no checkpoint of step {step} from which training could continue: {error}",
            step=step, error=error.message,
        ) from None  # fmt: skip
    for key in left.model.keys() | expected.keys():
        found, tensor = left.model.get(key), expected.get(key)
        if found is None or tensor is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
            raise UntrustedFileError(
                "runs.other_weights", "the run's weights do not fit this model (tensor {tensor})", tensor=key[:200]
            )
        if not bool(found.isfinite().all()):
            raise UntrustedFileError(
                "runs.weights_not_finite", "the run's weights are not finite (tensor {tensor})", tensor=key
            )
    return left


def refuse_links_in_checkpoint(checkpoint: Path, folders: Sequence[Path] = ()) -> None:
    """Check that ``folders`` and ``checkpoint`` are folders, and that the checkpoint contains only regular files. Call it before a file is opened.

    A link could lead anywhere, and a pipe would block. Raises: UntrustedFileError; OSError for a fault of the machine.
    """
    try:
        for folder in (*folders, checkpoint):
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                raise UntrustedFileError("runs.no_folder", "{folder} is not a folder", folder=folder.name)
        with os.scandir(checkpoint) as entries:
            for entry in entries:
                if not entry.is_file(follow_symlinks=False):
                    raise make_not_regular_file_error(f"{checkpoint.name}/{entry.name[:80]}")
    except FileNotFoundError:
        pass  # the code that opens the checkpoint reports this
    except OSError as error:
        if is_machine_fault_unrelated_to_files(error):
            raise
        raise UntrustedFileError(
            "runs.checkpoint_missing",
            "the checkpoint {checkpoint} is missing: {error}",
            checkpoint=checkpoint.name, error=error.strerror,
        ) from None  # fmt: skip


def read_step_lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of a JSON Lines file, each with a ``step``; [] if the file is missing. Raises: UntrustedFileError; OSError (machine)."""
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise make_missing_file_error(folder.name, error) from None
    try:
        return read_step_lines_in_open_folder(opened, name)
    finally:
        os.close(opened)


def read_step_lines_in_open_folder(folder: int, name: str) -> list[dict[str, Any]]:
    """Do the same as ``read_step_lines`` for a folder that is given as a descriptor."""
    if name not in os.listdir(folder):
        return []
    found, memory, read = list[dict[str, Any]](), LinesMemory(), 0
    with open_untrusted_file(folder, (name,), LOG_BYTES) as file:
        for line in iterate_lines(file):
            read += len(line)
            if read > LOG_BYTES:  # it grew since it was opened
                break
            try:
                memory.add(line)
            except ValueError as error:
                raise make_unreadable_file_error(name, error) from None
            try:
                record = parse_json(line)
            except ValueError:
                raise UntrustedFileError(
                    "runs.line_not_json", "{file} has a line that is not JSON", file=name
                ) from None
            if not isinstance(record, dict) or type(record.get("step")) is not int:
                raise UntrustedFileError("runs.line_without_step", "{file} has a line without a step", file=name)
            found.append(record)
    return found


def merge_adapted_weights(checkpoint: Checkpoint) -> Tensors:
    """The weights with LoRA's matrices merged, as the model computes with them. Without LoRA, the checkpoint's own.

    A run that begins or ends LoRA has other tensors than its first checkpoint. Merged, both have the same, so that their distance is measured.
    Raises: UntrustedFileError if the checkpoint's recipe and its matrices do not fit one another.
    """
    try:
        adapt = (checkpoint.state.get("recipe") or {}).get("adapt")
        return merge_lora(checkpoint.model, AdaptRecipe.model_validate(adapt)) if adapt else checkpoint.model
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise UntrustedFileError(
            "runs.cannot_be_merged",
            "the matrices of LoRA in the checkpoint of step {step} cannot be merged: {error}",
            step=checkpoint.step,
            error=str(error)[:300],
        ) from None
