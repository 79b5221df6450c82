"""Copies checkpoints of a segment while it trains, before the trainer removes them: the two of a drawn window, and a ladder for diagnoses.

The trainer may be hostile. A copy leaves no hard link and no access time on the trainer's files, so the trainer cannot learn which window was
drawn. Links that the trainer made are not followed. A copy whose files do not have the hashes of its manifest is not kept.

The ladder is a set of kept checkpoints: the last ``NEWEST``, and one at each doubling of the distance from the end. If an anomaly is noticed
late, the ladder therefore has a checkpoint shortly before the anomaly's onset.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from factory.audit.audit_windows import AuditWindow, draw_audit_window, record_audit_window
from factory.core.errors import FactoryError
from factory.core.faults import is_machine_fault_unrelated_to_files
from factory.core.path_removal import remove_path
from factory.core.untrusted_trainer_files import parse_json
from factory.core.workspace import Workspace
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.training.planning import read_last_checkpoint
from kernels.contract.files import sync_tree
from kernels.contract.message import Message
from trainer.contract.checkpoint.format import format_checkpoint_name, list_checkpoints

POLL_SECONDS = 0.05
MANIFEST_BYTES = 1 << 24
CHUNK = 1 << 22


def get_audit_folder(workspace: Workspace, segment: int) -> Path:
    """Return the folder of an audit's files. The files stay until the verdict, and no trainer can see the folder."""
    return workspace.root / "audits" / f"{segment:05d}"


def get_window_checkpoint_folder(plant: Plant, row: SegmentRow, step: int) -> Path:
    """Return the folder of the checkpoint at ``step``, where a window begins or ends. The folder may be missing."""
    if step == row.first_step and row.parent and row.has_steps:
        return Path(read_last_checkpoint(plant.ledger, row.parent)["path"])
    return get_audit_folder(plant.workspace, row.id) / "live" / format_checkpoint_name(step)


@contextmanager
def keep_window_checkpoints_while_training(plant: Plant, row: SegmentRow) -> Iterator[None]:
    """While the block trains a segment, keep the checkpoints of the window that was drawn for the segment. A failure here does not stop training."""
    try:
        window = draw_audit_window(plant, row)
    except FactoryError as error:
        plant.progress.line(
            Message(
                "audit.will_not_be",
                "  segment {segment} will not be audited: {error}",
                segment=row.id,
                error=error.message,
            )
        )
        window = None
    if window is None or not window.is_audited:
        yield
        return
    keeper = _Keeper(plant, row, window)
    with poll_in_thread(keeper.look):
        yield
    if SegmentRow.get(plant.ledger, row.id).state == "done":
        keep_window_checkpoints(plant, row, window)


def keep_window_checkpoints(plant: Plant, row: SegmentRow, window: AuditWindow) -> AuditWindow:
    """Keep the checkpoints of a finished segment's drawn windows or, if one is missing, of the whole segment. Returns the kept windows.

    A trainer therefore gains nothing if it hides steps by missing or broken checkpoints. If neither can be kept, the returned window has no steps,
    and a line tells a person. Raises: the error of a machine fault, after which a later call can still keep the window.
    """
    problem = ""
    whole = replace(window, first=row.first_step, last=row.last_step, resumed=())
    for kept in (window, whole):
        keeper = _Keeper(plant, row, kept)
        if keeper.look():
            return window if keeper.window == window else record_audit_window(plant.ledger, row.id, keeper.window)
        if keeper.fault:
            raise keeper.fault
        problem = problem or keeper.problem
    no_checkpoints = Message("audit.no_checkpoints", "the segment's checkpoints are missing")
    plant.progress.line(
        Message(
            "audit.not_kept",
            "  segment {segment} cannot be audited, because the factory could not keep the checkpoints that an "
            "audit needs: {problem}",
            segment=row.id, problem=problem or no_checkpoints,
        )
    )  # fmt: skip
    return record_audit_window(plant.ledger, row.id, replace(window, first=0, last=0, resumed=()))


@contextmanager
def poll_in_thread(poll: Callable[[], bool]) -> Iterator[None]:
    """Call ``poll`` repeatedly in a thread while the block runs, and once after the block. Stop as soon as ``poll`` returns True."""
    over = threading.Event()

    def looks() -> None:
        while not poll():
            if over.wait(POLL_SECONDS):
                poll()
                return

    thread = threading.Thread(target=looks, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _Keeper:
    """Copies the two checkpoints of a window as soon as they exist."""

    def __init__(self, plant: Plant, row: SegmentRow, window: AuditWindow) -> None:
        self.window, self.problem = window, ""
        self.fault: Exception | None = None  # of the machine, at the last look
        self.source = Path(row.folder) / "checkpoints"
        steps = {step for part in window.list_parts() for step in (part.first, part.last)}
        if row.has_steps and row.parent is None:
            steps.discard(row.first_step)  # new weights have no checkpoint
        self.targets = [get_window_checkpoint_folder(plant, row, step) for step in sorted(steps)]

    def look(self) -> bool:
        """Copy the checkpoints that exist. Returns True once both are kept."""
        self.fault = None
        for target in self.targets:
            if not target.exists():
                try:
                    copy_checkpoint(self.source / target.name, target)
                except FileNotFoundError:
                    pass  # not written yet, or removed again
                except (OSError, ValueError) as error:  # a full disk, or a broken checkpoint
                    lease = isinstance(error, BlockingIOError)  # the trainer may hold a lease on its files
                    self.problem, self.fault = (
                        str(error),
                        error if is_machine_fault_unrelated_to_files(error) and not lease else None,
                    )
        return all(target.exists() for target in self.targets)


def copy_checkpoint(source: Path, target: Path) -> None:
    """Copy a trainer's checkpoint. After an error or a kill, ``target`` does not exist.

    Raises: FileNotFoundError if the checkpoint is missing or was removed; ValueError if a file differs from the manifest; OSError.
    """
    aside = target.with_name(f".{target.name}")
    shutil.rmtree(aside, ignore_errors=True)
    with ExitStack() as opened:
        folder = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        opened.callback(os.close, folder)
        manifest = opened.enter_context(_open(folder, "manifest.json", MANIFEST_BYTES)).read()
        try:
            listed = {
                str(name): (str(f["sha256"]), int(f["bytes"])) for name, f in parse_json(manifest)["files"].items()
            }
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            raise ValueError(f"{source.name}: its manifest cannot be read") from None
        if odd := [name for name in listed if "/" in name or name.startswith(".")]:
            raise ValueError(f"{source.name}: its manifest names {odd[0]!r}")
        # All files are opened first, so that they stay readable if the trainer removes them.
        files = {name: opened.enter_context(_open(folder, name, size)) for name, (_, size) in listed.items()}
        aside.mkdir(parents=True)
        for name, file in files.items():
            if _copied(file, aside / name) != listed[name][0]:
                raise ValueError(f"{source.name}: {name} differs from its manifest")
        (aside / "manifest.json").write_bytes(manifest)
    sync_tree(aside)
    os.rename(aside, target)


def _open(folder: int, name: str, size: int) -> IO[bytes]:
    """Open a regular file of at most ``size`` bytes, without changing its access time where possible. Raises: OSError, ValueError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        handle = os.open(name, flags | os.O_NOATIME, dir_fd=folder)
    except PermissionError:  # another user's file
        handle = os.open(name, flags, dir_fd=folder)
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_size > size:
        os.close(handle)
        raise ValueError(f"{name} is not a regular file of at most {size} bytes")
    return os.fdopen(handle, "rb")


def _copied(file: IO[bytes], target: Path) -> str:
    """Copy a file and return its SHA-256."""
    digest = hashlib.sha256()
    with open(target, "xb") as out:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            out.write(chunk)
    return digest.hexdigest()


NEWEST = 3


def get_kept_checkpoints_folder(workspace: Workspace, segment: int) -> Path:
    """Return the folder of a segment's ladder of checkpoints."""
    return workspace.root / "ladder" / f"{segment:05d}"


def choose_steps_to_keep(steps: Collection[int], every: int) -> list[int]:
    """Return the steps of the checkpoints to keep, oldest first. A checkpoint that is left out once is never needed later.

    >>> choose_steps_to_keep(range(5, 105, 5), every=5)
    [40, 80, 90, 95, 100]
    >>> choose_steps_to_keep([40, 80, 90, 95, 100, 105], every=5)
    [40, 80, 90, 95, 100, 105]
    """
    ordered = sorted(steps)
    kept = set(ordered[-NEWEST:])
    for step in ordered[:-1]:
        if step % every == 0:
            distance = ordered[-1] // every - step // every
            band = 1 << max(0, distance.bit_length() - 1)  # the greatest power of two up to the distance
            if (step // every) % band == 0:
                kept.add(step)
    return sorted(kept)


@contextmanager
def keep_checkpoints_while_training(workspace: Workspace, row: SegmentRow) -> Iterator[None]:
    """While the block trains a segment, keep its ladder of checkpoints. A failure here does not stop training. Retention removes old ladders."""
    if not row.has_steps:
        yield
        return
    source, target = Path(row.folder) / "checkpoints", get_kept_checkpoints_folder(workspace, row.id)
    with poll_in_thread(lambda: update_kept_checkpoints(source, target, row.recipe_json["checkpoint_every"])):
        yield


def update_kept_checkpoints(source: Path, target: Path, every: int) -> bool:
    """Copy the checkpoints that the ladder lacks, and remove those that it no longer needs. Returns False, since more checkpoints may follow."""
    for left in target.glob(".*"):  # left by a killed process
        remove_path(left)
    held, there = ({step for step, _ in list_checkpoints(folder)} for folder in (target, source))
    wanted = choose_steps_to_keep(held | there, every)
    for step in wanted:
        if step not in held:
            try:
                copy_checkpoint(source / format_checkpoint_name(step), target / format_checkpoint_name(step))
            except (OSError, ValueError):
                continue  # removed, not complete, or the disk is full: the ladder lacks this checkpoint
    for step in held - set(wanted):
        with suppress(OSError):
            aside = (
                target / f".{format_checkpoint_name(step)}"
            )  # a half-removed checkpoint must not have a checkpoint's name
            os.rename(target / format_checkpoint_name(step), aside)
            remove_path(aside)
    return False
