"""One sandboxed trainer, several timed runs: the clock starts when the run's data plan is revealed, and stops at its weights.

The trainer is started once (``python -m trainer --wait …``), warms up on a run that is not timed, and then waits. A run is
revealed by writing its ``segment.json``, whose fresh random seed decides the data, so that nothing can be computed before. The clock
stops when the result is there, and the weights are read at that moment, so that nothing can be computed after. Start-up and compilation
are not timed on either side. Only one side runs at a time, so that neither can slow the other.

The candidate can write in the folder, so it is only entered through descriptors of folders that were made before the sandbox started, and
no link in it is followed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from factory.core.faults import is_of_no_file
from factory.core.removal import remove
from factory.gates.untrusted_files import (
    UntrustedFileError,
    object_of,
    read_bytes,
    read_object,
    read_tensors,
    tensors_of,
)
from factory.runs.folders import reveal
from factory.sandbox import clock as sandbox_clock
from factory.sandbox import sandbox
from factory.sandbox.clock import CpuSeconds
from factory.sandbox.sandbox import Limits

POLL_SECONDS = 0.003
WARM_STEPS = 20  # of a process, at most: until then its runs are some percent slower
STATE_BYTES = 1 << 26  # most of a checkpoint's JSON
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Rest:
    """What a checkpoint holds besides the weights, and a later run continues from."""

    optimizer: Weights
    state: dict[str, Any]


@dataclass(frozen=True)
class TimedRun:
    seconds: float  # from the reveal of the data plan to the result, by this process's clock
    weights: Weights
    rest: Rest | None = None  # of the runs that are compared whole
    early: Weights = field(default_factory=dict)  # of an earlier step, where it was asked for
    cpu: CpuSeconds | None = None  # of the sandbox's processes over the same seconds; None: it could not be read


@dataclass
class PatchSession:
    """The runs of one sandboxed trainer. ``failed``: what went wrong; '': nothing."""

    runs: list[TimedRun] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)  # of all runs, the warm-up's first
    failed: str = ""
    seconds: float = 0.0  # all of it, start-up included
    out_of_time: bool = False  # its time limit ended it, which says nothing about its code


def timed_session(
    folder: Path,
    code: Path,
    specs: Sequence[dict[str, Any]],
    readonly: Sequence[Path],
    origin: Weights,
    wall_seconds: float,
    whole: Collection[int],
    early: Mapping[int, int],
) -> PatchSession:
    """Run ``specs`` one after the other in one sandboxed trainer; the first is the warm-up. Raises: IsolationError; OSError for a fault of
    the machine.

    Every run must leave a checkpoint that training can continue from. ``whole``: the numbers of the runs whose checkpoint is returned
    besides the weights; ``early``: number → an earlier step whose weights are returned too.
    """
    remove(folder / "segments")
    first = 1 + secrets.randbelow(90_000)  # named as live segments are
    folders = [folder / "segments" / f"{first + number:05d}-trunk" for number in range(len(specs))]
    for run in folders:
        run.mkdir(parents=True)
    descriptors = [os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) for run in folders]
    session = PatchSession(folders=folders)
    revealer = _Revealer(descriptors, specs, origin, session, whole, early)
    try:
        revealer.start()
        result = sandbox.run(
            [sys.executable, "-m", "trainer", "--wait", *map(str, folders)],
            output=folder,
            readonly=[code, *readonly],
            cwd=code,
            limits=Limits(wall_seconds=wall_seconds),
            begun=revealer.inits.append,
            enough=revealer.enough,
        )
    finally:
        revealer.over.set()
        revealer.join()
        for descriptor in descriptors:
            os.close(descriptor)
    if revealer.fault:
        raise revealer.fault
    session.seconds = result.seconds
    if not session.failed and len(session.runs) < len(specs) - 1:
        session.failed = result.why() if not result.ok else "the trainer ended before its runs were done"
        session.out_of_time = result.timed_out
    return session


class _Revealer(threading.Thread):
    """Reveals one run after the other, and times them."""

    def __init__(
        self,
        folders: Sequence[int],
        specs: Sequence[dict[str, Any]],
        origin: Weights,
        session: PatchSession,
        whole: Collection[int],
        early: Mapping[int, int],
    ) -> None:
        super().__init__(daemon=True)
        self.whole, self.early = whole, early
        self.folders, self.specs, self.origin, self.session = folders, specs, origin, session
        self.over, self.enough = threading.Event(), threading.Event()
        self.inits: list[int] = []  # of the sandbox, once it runs
        self.fault: OSError | None = None

    def run(self) -> None:
        try:
            self._reveal_all()
        except OSError as error:
            self.fault = error
            self.enough.set()

    def _reveal_all(self) -> None:
        """Raises: OSError for a fault of the machine, which says nothing about the code."""
        for number, (folder, spec) in enumerate(zip(self.folders, self.specs, strict=True)):
            if not self._wait_for(folder, "ready"):
                return
            used, began = sandbox_clock.read(self.inits[0]), time.monotonic()
            try:
                reveal(folder, spec)
            except OSError as error:  # the code in the sandbox took the name
                if is_of_no_file(error):
                    raise
                self._fail(f"run {number} could not be revealed: {error.strerror}")
                return
            if not self._wait_for(folder, "result.json"):
                return
            seconds, cpu = time.monotonic() - began, sandbox_clock.between(used, sandbox_clock.read(self.inits[0]))
            if number == 0:
                continue
            weights, problem = read_weights(folder, spec["last_step"], self.origin)
            rest, before = None, Weights()
            if not problem:  # read of each run, so that code cannot know which are compared
                rest, problem = read_rest(folder, spec["last_step"], self.origin)
            if not problem and number in self.early:
                before, problem = read_weights(folder, self.early[number], self.origin)
            if problem:
                self._fail(f"run {number}: {problem}")
                return
            self.session.runs.append(TimedRun(seconds, weights, rest if number in self.whole else None, before, cpu))

    def _fail(self, why: str) -> None:
        self.session.failed = why
        self.enough.set()  # else the trainer would wait for its next run until its time limit

    def _wait_for(self, folder: int, name: str) -> bool:
        while not self.over.is_set():
            try:
                os.stat(name, dir_fd=folder, follow_symlinks=False)
                return True
            except OSError:
                time.sleep(POLL_SECONDS)
        # The trainer may have ended right after it wrote the file.
        try:
            os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return False
        return True


def read_weights(folder: int, step: int, origin: Weights) -> tuple[Weights, str]:
    """(weights that a run left after ``step``, what is wrong with them); the second is '' when they are usable."""
    expected = sum(tensor.numel() * tensor.element_size() for tensor in origin.values())
    try:
        weights = read_tensors(
            folder, ("checkpoints", f"step-{step:08d}", "model.safetensors"), 2 * expected + (1 << 20)
        )
    except UntrustedFileError as error:
        return {}, f"it left no weights of step {step}: {error}"
    for name, tensor in origin.items():
        found = weights.get(name)
        if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype or len(weights) != len(origin):
            return {}, f"its weights are not this model's ({name})"
        if not bool(found.isfinite().all()):
            return {}, f"its weights are not finite ({name})"
    return weights, ""


def read_rest(folder: int, step: int, origin: Weights) -> tuple[Rest | None, str]:
    """(what else a run left after ``step``, what is wrong with it); each file must be what its manifest says."""
    parts = ("checkpoints", f"step-{step:08d}")
    size = sum(tensor.numel() * tensor.element_size() for tensor in origin.values())
    limits = {"model.safetensors": 2 * size, "optimizer.safetensors": 4 * size, "state.json": STATE_BYTES}
    try:
        manifest = read_object(folder, (*parts, "manifest.json"), STATE_BYTES)
        listed = manifest.get("files")
        stored = {}
        for name, limit in limits.items():
            stored[name] = read_bytes(folder, (*parts, name), limit + (1 << 20))
            expected = listed.get(name) if isinstance(listed, dict) else None
            if expected != {"bytes": len(stored[name]), "sha256": hashlib.sha256(stored[name]).hexdigest()}:
                raise UntrustedFileError(f"{name} is not what manifest.json says")
        optimizer = tensors_of(stored["optimizer.safetensors"], "optimizer.safetensors")
        return Rest(optimizer, object_of(stored["state.json"], "state.json")), ""
    except UntrustedFileError as error:
        return None, f"it left no checkpoint of step {step} that training could continue from: {error}"
