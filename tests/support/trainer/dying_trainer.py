"""The trainer, sent a signal at a moment that is counted, not timed: ``python dying_trainer.py SIGNAL STEP CALLS [RANK] FOLDER``.

CALLS Python calls after the beginning of the first step that is not before STEP; of torchrun's ranks RANK alone, and before
they are started again. So no slow machine or fast one misses the moment. Each process says which checkpoints it found.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.__main__ import EXIT_STOPPED, main, write_exit_code
from trainer.contract import stopping
from trainer.contract.checkpoint import format as checkpoints
from trainer.run import SegmentRun


def die_at(sent: signal.Signals, step: int, calls: int) -> None:
    launch, left = SegmentRun.launch_step, calls

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        left -= event == "call"
        if left <= 0:
            sys.setprofile(None)
            os.kill(os.getpid(), sent)

    def counted(self: SegmentRun, batch: Any) -> None:
        if batch.step >= step and left > 0:
            sys.setprofile(count)
        launch(self, batch)

    SegmentRun.launch_step = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    name, step, calls, rank, folder = sys.argv[1:]
    life, own = (os.environ.get(variable, "0") for variable in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
    found = [number for number, _ in checkpoints.list_checkpoints(Path(folder) / "checkpoints")]
    Path(folder, f"life-{life}-{own}.json").write_text(json.dumps({"pid": os.getpid(), "found": found}))
    if life == "0" and own == rank:
        die_at(signal.Signals[name], int(step), int(calls))
    stopping.end_on_sigterm(before_exit=functools.partial(write_exit_code, Path(folder), EXIT_STOPPED))
    sys.exit(main([folder]))
