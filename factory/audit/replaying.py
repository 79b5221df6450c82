"""Runs a window of a segment again, in the sandbox, with other code: the same specification, the same checkpoint, the same data.

A replay that ended is not run again after a kill. Its process goes on as a segment that was stopped does, and is ended when the checkpoint at
the end of the window is there. It compiles for itself: what live code compiled is not trusted.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from factory.audit.drawing import AuditWindow
from factory.audit.keeping import folder_of, kept
from factory.computing.tuned_kernels import KERNELS
from factory.core import devices
from factory.core.launching import ranks
from factory.core.removal import remove
from factory.core.workspace import Workspace
from factory.gates.patch.training import for_one_rank
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.runs.folders import write_spec
from factory.sandbox import sandbox
from factory.sandbox.sandbox import Limits
from factory.training.segment_folder import spec_of
from kernels.contract.choice import resolved_text
from kernels.contract.files import write_atomically
from trainer.contract.checkpoint.format import name_of

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class WindowReplay:
    """How a replay ended. ``failed``: why there is no checkpoint; '': there is one."""

    seconds: float
    failed: str = ""
    out_of_time: bool = False


@dataclass(frozen=True)
class Replays:
    """The replays of one window."""

    workspace: Workspace
    ledger: Ledger
    row: SegmentRow
    window: AuditWindow
    tuned: Mapping[str, str]  # op → the implementation that ``auto`` stood for before the patches
    wall_seconds: float

    @property
    def folder(self) -> Path:
        return folder_of(self.workspace, self.row.id)

    def segment(self, name: str) -> Path:
        """The folder that a replay's trainer writes in, named as the segment's own."""
        return self.folder / name / Path(self.row.folder).name

    def checkpoint(self, name: str, step: int) -> Path:
        return self.segment(name) / "checkpoints" / name_of(step)

    def run(self, name: str, code: Path, until: int) -> WindowReplay:
        """Replay with ``code`` from the window's first step until there is a checkpoint of step ``until``. Raises: IsolationError."""
        done = self.folder / f"{name}.json"
        if done.exists():
            return WindowReplay(**json.loads(done.read_text()))
        with devices.one():
            found = self._run(name, code, until)
        if not found.failed:
            write_atomically(done, json.dumps(asdict(found)))
        return found

    def _run(self, name: str, code: Path, until: int) -> WindowReplay:
        remove(self.folder / name)  # of a process that was killed here
        segment, start = self.segment(name), kept(Plant(self.workspace, self.ledger), self.row, self.window.first)
        segment.mkdir(parents=True)
        spec = self._spec(segment, code, until)
        write_spec(segment, spec)
        if self.window.first > self.row.first_step:
            shutil.copytree(start, segment / "checkpoints" / start.name)
        return replay_segment(self.folder / name, segment, spec, code, start, until, self.wall_seconds)

    def _spec(self, segment: Path, code: Path, until: int) -> dict[str, Any]:
        """As the segment had it, but for the kernels, whose choice is the code's own, and for what one rank cannot do."""
        spec = spec_of(self.ledger, self.row)
        recipe = for_one_rank(spec["recipe"]) if ranks(self.workspace) > 1 else spec["recipe"]
        if until != self.window.last:
            recipe = recipe | {"checkpoint_every": until, "keep_checkpoints": 2}
        kernels = None
        if self.row.computing is not None:
            kernels = segment / "kernels.yaml"
            kernels.write_text(resolved_text((code / KERNELS).read_bytes(), devices.kind(), self.tuned))
        return spec | {"recipe": recipe, "kernels": kernels and str(kernels)}


def replay_segment(
    output: Path,
    segment: Path,
    spec: Mapping[str, Any],
    code: Path,
    start: Path,
    until: int,
    wall_seconds: float,
    python: str = "",
) -> WindowReplay:
    """Train in the sandbox with ``code``, in a folder that is ready to run, until there is a checkpoint of step ``until``.

    ``output`` holds the folder and may be written; ``start`` is where it goes on from; ``python``: the interpreter of another environment.
    Raises: IsolationError.
    """
    size = sum(file.stat().st_size for file in start.iterdir())
    limits = Limits(
        wall_seconds=wall_seconds,
        memory=max(Limits.memory, 8 * size),
        file=max(Limits.file, 2 * size),
        output=max(Limits.output, 8 * size),
    )
    shards = [Path(shard["path"]) for shard in spec["data_plan"]["token_shards"]]
    environments = [Path(path).parent.parent for path in (python, os.path.realpath(python))] if python else []
    watcher = _Watcher(segment, name_of(until))
    watcher.start()
    try:
        result = sandbox.run(
            [python or sys.executable, "-m", "trainer", str(segment)],
            output=output,
            readonly=[code, start, *shards, *environments],
            cwd=code,
            limits=limits,
            enough=watcher.enough,
        )
    finally:
        watcher.over.set()
        watcher.join()
    if watcher.there():
        return WindowReplay(result.seconds)
    return WindowReplay(result.seconds, result.why(), result.timed_out)


class _Watcher(threading.Thread):
    """Sets ``enough`` when a checkpoint is there: it is renamed into place, so it is whole."""

    def __init__(self, segment: Path, name: str) -> None:
        super().__init__(daemon=True)
        self.over, self.enough = threading.Event(), threading.Event()
        self.manifest = segment / "checkpoints" / name / "manifest.json"

    def there(self) -> bool:
        return os.path.lexists(self.manifest)

    def run(self) -> None:
        while not self.over.wait(POLL_SECONDS):
            if self.there():
                self.enough.set()
                return
