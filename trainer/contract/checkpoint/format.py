"""The checkpoint format. A checkpoint is written aside, fsynced, hashed in a manifest, then renamed. Loading verifies the hashes.

    step-00000120/model.safetensors      fp32 weights, the model's own names
                  optimizer.safetensors  exp_avg.*, exp_avg_sq.*, step.*, momentum.*, and the random number generator
                  state.json             step, kind, recipe, sampler, detector, counters
                  manifest.json          size and SHA-256 of the others

The checkpoint of an imported model has weights only. Its ``kind`` is ``IMPORT``, its step is 0, its file optimizer.safetensors is empty, and its
state.json has no sampler and no counters. A run that starts from it begins with the state of a first step.

Each of several ranks writes the tensors that it holds, as ``model-00001-of-00004.safetensors`` and so on. The file's metadata names the
region of each tensor. Any number of ranks can load a checkpoint; each reads the regions that it needs. Pickle is never used.

A folder with the final name is complete, because the rename comes last. A writer that is killed earlier leaves a folder whose name
starts with a dot. The next run removes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors import SafetensorError
from torch import Tensor

from kernels.contract.files import sync_folder
from kernels.contract.message import Message
from models.files.safetensors_file import TORCH_NAMES, Layout, iterate_safetensors
from trainer.contract.bounded_json import parse_bounded_json, read_bounded_json
from trainer.contract.checkpoint.region import Region
from trainer.contract.errors import ERRORS_OF_NO_FILE, CheckpointError

FORMAT = 2
IMPORT = "import"  # the kind of a checkpoint that has weights only (``write_imported_checkpoint``)
KINDS = ("model", "optimizer")
DTYPES = {getattr(torch, ours): theirs for theirs, ours in TORCH_NAMES.items()}
REGIONS = "regions"  # metadata of a file that holds parts of tensors: {name: [whole shape, offset]}
POLL_SECONDS = 0.01

Tensors = dict[str, Tensor]
Regions = dict[str, Region]


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to continue."""

    model: Tensors
    optimizer: Tensors
    state: dict[str, Any]  # JSON values

    @property
    def step(self) -> int:
        return int(self.state["step"])


@dataclass(frozen=True)
class SkippedCheckpoint:
    """A checkpoint that could not be loaded."""

    path: str
    reason: str


@dataclass(frozen=True)
class UnchangedWeights:
    """Weights that a segment does not change. A save reads each of them when it is written, so that memory holds one."""

    layout: Layout
    read: Callable[[str], Tensor]
    record: Path | None = None  # the checkpoint that ``read`` needs


NOTHING_UNCHANGED = UnchangedWeights({}, lambda name: torch.empty(0))


def format_checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def save_checkpoint(parent: Path, checkpoint: Checkpoint) -> Path:
    """Write ``parent/step-…`` atomically. Raises: OSError, with nothing left behind."""
    contents = {"model": checkpoint.model, "optimizer": checkpoint.optimizer}
    return save_rank_share(parent, checkpoint.step, contents, {}, checkpoint.state)


def save_rank_share(
    parent: Path,
    step: int,
    contents: dict[str, Tensors],
    regions: Regions,
    state: dict[str, Any] | None,
    rank: int = 0,
    ranks: int = 1,
    unchanged: UnchangedWeights = NOTHING_UNCHANGED,
) -> Path:
    """Write one rank's part of a checkpoint. Rank 0, which has the ``state``, waits for the others and renames the folder.

    ``regions``: the region of each split tensor; a tensor that is not listed is whole. ``unchanged``: further weights. Ranks share a file system.
    Raises: OSError, and the errors of ``unchanged``, with nothing left behind.
    """
    parent.mkdir(parents=True, exist_ok=True)
    target = parent / format_checkpoint_name(step)
    aside = parent / f".writing-{target.name}"
    aside.mkdir(exist_ok=True)
    try:
        files = {}
        for kind, tensors in contents.items():
            name = f"{kind}.safetensors" if ranks == 1 else f"{kind}-{rank + 1:05d}-of-{ranks:05d}.safetensors"
            more = unchanged if kind == "model" else NOTHING_UNCHANGED
            layout = _describe_layout(tensors) | dict(more.layout)
            parts = {n: [r.whole, r.offset] for n, r in regions.items() if n in layout and r.shape != r.whole}
            metadata = {REGIONS: json.dumps(parts)} if parts else None
            read_later = ((n, more.read(n)) for n in more.layout)
            written = iterate_safetensors(layout, chain(tensors.items(), read_later), metadata)
            files[name] = _write(aside / name, written)
        if rank:
            _write(aside / f".share-{rank:05d}", iter([json.dumps(files).encode()]))
            os.rename(aside / f".share-{rank:05d}", aside / f"share-{rank:05d}.json")
            return target
        files["state.json"] = _write(aside / "state.json", iter([json.dumps(state, sort_keys=True).encode()]))
        for other in range(1, ranks):
            files |= _await_share(aside / f"share-{other:05d}.json")
        return _complete(parent, target, aside, step, files)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def write_imported_checkpoint(
    parent: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, Tensor]], state: dict[str, Any]
) -> Path:
    """Write the checkpoint of a model that was trained elsewhere, atomically and one tensor at a time. Returns its folder.

    ``shapes``: name → shape of every tensor, in the order in which ``tensors`` yields them; each is stored as fp32. ``state``: further keys of
    state.json, such as ``recipe``. Raises: OSError, ValueError for a tensor that is not in ``shapes``, and the errors of ``tensors``. Nothing is
    left behind then.
    """
    parent.mkdir(parents=True, exist_ok=True)
    target = parent / format_checkpoint_name(0)
    aside = parent / f".writing-{target.name}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        whole = {"step": 0, "kind": IMPORT, "first_step": 0, **state}
        left = iter(tensors)
        weights = iterate_safetensors({name: (torch.float32, shape) for name, shape in shapes.items()}, left)
        model = _write(aside / "model.safetensors", weights)
        if extra := next(left, None):  # at its end, ``tensors`` checks its source
            raise ValueError(f"unexpected tensor {extra[0]}")
        empty = iterate_safetensors_bytes({})
        files = {
            "model.safetensors": model,
            "optimizer.safetensors": _write(aside / "optimizer.safetensors", empty),
            "state.json": _write(aside / "state.json", iter([json.dumps(whole, sort_keys=True).encode()])),
        }
        return _complete(parent, target, aside, 0, files)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _complete(parent: Path, target: Path, aside: Path, step: int, files: dict[str, Any]) -> Path:
    """Write the manifest of a checkpoint's files, and give the folder its name."""
    manifest = {"format": FORMAT, "step": step, "files": files}
    _write(aside / "manifest.json", iter([json.dumps(manifest, sort_keys=True, indent=1).encode()]))
    sync_folder(aside)
    if target.exists():
        shutil.rmtree(target)
    os.rename(aside, target)
    sync_folder(parent)
    return target


def delete_unfinished_checkpoints(parent: Path) -> None:
    """Remove the folders that killed writers left. No writer may be running."""
    for aside in parent.glob(".writing-*"):
        shutil.rmtree(aside, ignore_errors=True)


def load_checkpoint(path: Path) -> Checkpoint:
    """A whole checkpoint, verified. Raises: CheckpointError that names the file and the fault; OSError as ``find_checkpoint_fault``."""
    if fault := find_checkpoint_fault(path):
        raise CheckpointError(Message.from_json(fault))
    return Checkpoint(read_tensors(path, "model"), read_tensors(path, "optimizer"), read_checkpoint_state(path))


def find_checkpoint_fault(path: Path, share_index: int = 0, share_count: int = 1) -> str:
    """The first fault of a checkpoint; '' if there is none. Every ``share_count``-th of its files is hashed, from ``share_index`` on.

    Raises: OSError for an error that says nothing about the checkpoint, such as too many open files.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return error.message
    files = manifest["files"]
    for kind in ("state.json", *KINDS):
        if not any(name.startswith(kind) for name in files):
            return Message(
                "trainer.manifest_lacks",
                "{checkpoint}: manifest.json does not list {file}",
                checkpoint=str(path),
                file=kind,
            )
    for name, expected in sorted(files.items())[share_index::share_count]:
        file = path / name
        try:
            size = file.stat().st_size
            if size != expected["bytes"]:
                return Message(
                    "trainer.other_size",
                    "{file} has {found} bytes, but its manifest says {expected} bytes",
                    file=str(file),
                    found=size,
                    expected=expected["bytes"],
                )
            with open(file, "rb") as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != expected["sha256"]:
                    return make_hash_mismatch_fault(file)
        except OSError as error:
            if error.errno in ERRORS_OF_NO_FILE:
                raise
            return Message(
                "trainer.unreadable", "{file} cannot be read: {problem}", file=str(file), problem=error.strerror
            )
    return ""


def make_hash_mismatch_fault(file: Path) -> Message:
    """The fault of a file whose hash differs from the manifest's."""
    return Message(
        "trainer.hash_mismatch",
        "{file}: the SHA-256 of this file differs from the one in manifest.json",
        file=str(file),
    )


def read_checkpoint_state(path: Path) -> dict[str, Any]:
    """The contents of state.json. Raises: CheckpointError; OSError as ``find_checkpoint_fault``."""
    try:
        return dict(read_bounded_json(path / "state.json"))
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, OSError) and error.errno in ERRORS_OF_NO_FILE:
            raise
        raise CheckpointError(
            "trainer.no_state", "{file} cannot be read: {problem}", file=str(path / "state.json"), problem=str(error)
        ) from None


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of one of ``KINDS`` by name, each read from the checkpoint when it is asked for, so that memory holds one.

    ``wanted_regions``: as in ``read_tensors``. Raises: as ``read_tensors``, when it is made and for each tensor.
    """

    def __init__(self, path: Path, kind: str, wanted_regions: Regions | None = None) -> None:
        self.path, self.kind, self.wanted_regions = path, kind, wanted_regions or {}
        self.files: dict[str, list[str]] = {}
        for file in _list_files(path, kind):
            with _damage_named(path / file), safetensors.safe_open(str(path / file), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - no mapping
                    self.files.setdefault(name, []).append(file)

    def __getitem__(self, name: str) -> Tensor:
        return _read_from(self.path, self.kind, self.files[name], self.wanted_regions, name)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def read_tensors(path: Path, kind: str, wanted_regions: Regions | None = None) -> Tensors:
    """Tensors of one of ``KINDS``, on the CPU. ``wanted_regions`` names the region to read of a tensor; tensors without a region are read whole.

    Raises: CheckpointError that names the tensor or file that is damaged, incomplete or of another shape.
    """
    return _read_from(path, kind, _list_files(path, kind), wanted_regions or {})


def _list_files(path: Path, kind: str) -> list[str]:
    names = sorted(read_manifest(path)["files"])
    return [name for name in names if name.startswith(kind) and name.endswith(".safetensors")]


@contextmanager
def _damage_named(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            "trainer.damaged_file", "{file} cannot be read: {problem}", file=str(file), problem=str(error)
        ) from None


def iterate_tensors(path: Path, kind: str, wanted_regions: Regions | None = None) -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``read_tensors``, each yielded as soon as it is complete, so that memory need not hold all. Each file is opened once.

    Raises: as ``read_tensors``, for an incomplete tensor at the end.
    """
    return _iterate_from(path, kind, _list_files(path, kind), wanted_regions or {})


def _read_from(path: Path, kind: str, files: list[str], wanted_regions: Regions, only: str | None = None) -> Tensors:
    """The tensors of these files, or the one of the name ``only``."""
    return dict(_iterate_from(path, kind, files, wanted_regions, only))


def _iterate_from(
    path: Path, kind: str, files: list[str], wanted_regions: Regions, only: str | None = None
) -> Iterator[tuple[str, Tensor]]:
    begun: Tensors = {}  # of which files that come later have parts
    missing: dict[str, int] = {}  # elements; 0: yielded
    for name in files:
        with _damage_named(path / name), safetensors.safe_open(str(path / name), framework="pt") as file:
            parts = parse_bounded_json((file.metadata() or {}).get(REGIONS, "{}"))
            for key in file.keys() if only is None else [only]:  # noqa: SIM118 - no mapping
                part = file.get_slice(key)
                shape = tuple(part.get_shape())
                whole, offset = map(tuple, parts.get(key, (shape, (0,) * len(shape))))
                region = wanted_regions.get(key, Region(whole, (0,) * len(whole), whole))
                if region.whole != whole:
                    raise CheckpointError(
                        "trainer.other_shape",
                        "recipe.model does not fit the checkpoint: {tensor} has shape {wanted} in the recipe, but {found} in "
                        "{file}.",
                        tensor=key,
                        wanted=str(list(region.whole)),
                        found=str(list(whole)),
                        file=str(path / name),
                    )
                if key not in missing and region.shape == shape and region.offset == offset:
                    missing[key] = 0
                    yield key, file.get_tensor(key)
                elif missing.get(key) != 0:
                    _copy_overlap(begun, missing, key, region, Region(whole, offset, shape), part)
                    if not missing[key]:
                        yield key, begun.pop(key)
    for key, count in missing.items():
        if count:
            raise CheckpointError(
                "trainer.missing_elements",
                "{checkpoint}: {kind} tensor {tensor} lacks {count:,|element|elements}.",
                checkpoint=str(path),
                count=count,
                kind=kind,
                tensor=key,
            )


def _copy_overlap(found: Tensors, missing: dict[str, int], key: str, wanted: Region, held: Region, part: Any) -> None:
    """Copy the overlap of a file's part of a tensor with the wanted region."""
    starts = [max(a, b) for a, b in zip(wanted.offset, held.offset)]
    stops = [min(a + m, b + n) for a, m, b, n in zip(wanted.offset, wanted.shape, held.offset, held.shape)]
    here = tuple(slice(a - o, b - o) for a, b, o in zip(starts, stops, held.offset))
    there = tuple(slice(a - o, b - o) for a, b, o in zip(starts, stops, wanted.offset))
    if key not in found:
        dtype = next(dtype for dtype, name in DTYPES.items() if name == part.get_dtype())
        found[key] = torch.empty(wanted.shape, dtype=dtype)
        missing[key] = found[key].numel()
    if all(a < b for a, b in zip(starts, stops)):
        found[key][there] = part[here]
        missing[key] -= found[key][there].numel()


def read_manifest(path: Path) -> dict[str, Any]:
    """The contents of manifest.json. Raises: CheckpointError; OSError as ``find_checkpoint_fault``."""
    try:
        manifest = read_bounded_json(path / "manifest.json")
        found = manifest["format"], {n: (f["sha256"], f["bytes"]) for n, f in manifest["files"].items()}
    except OSError as error:
        if error.errno in ERRORS_OF_NO_FILE:
            raise
        raise CheckpointError(
            "trainer.not_a_checkpoint",
            "{folder} is not a checkpoint, because its manifest.json cannot be read: {problem}",
            folder=str(path),
            problem=error.strerror,
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged_manifest(path, str(error)) from None
    if any("/" in name or name in ("", ".", "..") for name in found[1]):
        raise _damaged_manifest(
            path, Message("trainer.other_folders", "manifest.json names files outside the checkpoint's folder")
        )
    if found[0] != FORMAT:
        raise CheckpointError(
            "trainer.checkpoint_format",
            "{checkpoint}: the checkpoint has format {found}, but this code reads format {expected}.",
            checkpoint=str(path),
            found=found[0],
            expected=FORMAT,
        )
    return dict(manifest)


def _damaged_manifest(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        "trainer.damaged_manifest",
        "{checkpoint}: manifest.json is damaged: {problem}",
        checkpoint=str(path),
        problem=problem,
    )


def hash_manifest(path: Path) -> str:
    return hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()


def list_checkpoints(parent: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a folder, oldest first."""
    found = [(int(path.name.removeprefix("step-")), path) for path in parent.glob("step-[0-9]*") if path.is_dir()]
    return sorted(found)


def mark_checkpoint_as_bad(path: Path, reason: str) -> SkippedCheckpoint:
    """Rename a checkpoint that cannot be loaded to ``bad-…``."""
    away = path.with_name(f"bad-{path.name}")
    shutil.rmtree(away, ignore_errors=True)
    path.rename(away)
    return SkippedCheckpoint(str(away), reason)


def iterate_safetensors_bytes(tensors: Tensors, metadata: dict[str, str] | None = None) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file in pieces (``iterate_safetensors``)."""
    return iterate_safetensors(_describe_layout(tensors), tensors.items(), metadata)


def _describe_layout(tensors: Tensors) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def _await_share(path: Path) -> dict[str, Any]:
    """The files of another rank. The function waits without a limit: a rank that fails ends its process, and torchrun then ends all ranks."""
    while not path.exists():
        time.sleep(POLL_SECONDS)
    files = dict(json.loads(path.read_bytes()))
    path.unlink()
    return files


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
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
