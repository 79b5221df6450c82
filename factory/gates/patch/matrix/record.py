"""Runs inside the sandbox, from a worktree: trains segment folders, and notes what of ``trainer/`` and ``kernels/`` was executed.

``python record.py REQUEST OUT``. REQUEST is JSON: ``{"folders": [{"folder", "stop_after"}],
"instructions": [paths of files whose single instructions are noted]}``. OUT gets, for each rank, ``lines-RANK.json``:
``{"lines": {path: [numbers]}, "instructions": {path: [[name, first line, offset]…]}, "codes": [exit code of each folder]}``.
This file is approved code; the process also runs the candidate's, which could forge what is noted: what is noted is used only to
hold patches back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

sys.path[0] = os.getcwd()  # the worktree's packages, not this file's neighbours


class Recorder:
    """A trace function that costs nothing outside the folders that it watches."""

    def __init__(self, root: str, precise: list[str]) -> None:
        self.folders = (f"{root}/trainer/", f"{root}/kernels/")
        self.precise = {f"{root}/{path}" for path in precise}
        self.lines: dict[str, set[int]] = defaultdict(set)
        self.instructions: dict[str, set[tuple[str, int, int]]] = defaultdict(set)

    def start(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def stop(self) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(self.folders):
            return None
        self.lines[name].add(frame.f_lineno)
        if name in self.precise:
            frame.f_trace_opcodes = True
            return self._instruction
        return self._line

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.lines[frame.f_code.co_filename].add(frame.f_lineno)
        return self._line

    def _instruction(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if event == "opcode":
            self.instructions[code.co_filename].add((code.co_qualname, code.co_firstlineno, frame.f_lasti))
        elif event == "line":
            self.lines[code.co_filename].add(frame.f_lineno)
        return self._instruction


def train(folder: Path, stop_after: int) -> int:
    """The segment's exit code. ``stop_after`` steps the trainer hears that it should stop, and is started once more."""
    from trainer.__main__ import main
    from trainer.contract import stopping

    if not stop_after:
        return main([str(folder)])
    asked, left = stopping.asked, [stop_after + 1]  # once before the segment, then at every step

    def soon() -> bool:
        left[0] -= 1
        return left[0] <= 0

    stopping.asked = soon
    try:
        first = main([str(folder)])
    finally:
        stopping.asked = asked
    return main([str(folder)]) if first == 75 else 1000 + first


def as_ranks(count: int) -> int:
    """This program once for each rank, in a network namespace of their own. The first exit code that is not 0, or 0.

    The store through which ranks find one another is this process's, as torchrun's is: each segment joins a new group in it.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True)
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv], env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(count)
    ]
    return next((code for code in [rank.wait() for rank in ranks] if code), 0)


if __name__ == "__main__":
    request = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    if request["ranks"] > 1 and "RANK" not in os.environ:
        sys.exit(as_ranks(request["ranks"]))
    recorder = Recorder(os.getcwd(), request["instructions"])
    recorder.start()
    codes = []
    for entry in request["folders"]:
        try:
            codes.append(train(Path(entry["folder"]), entry["stop_after"]))
        except BaseException as error:  # the next case is another's
            print(f"{entry['folder']}: {type(error).__name__}: {error}", file=sys.stderr)
            codes.append(-1)
    recorder.stop()
    found = {
        "lines": {os.path.relpath(name): sorted(lines) for name, lines in recorder.lines.items()},
        "instructions": {os.path.relpath(name): sorted(parts) for name, parts in recorder.instructions.items()},
        "codes": codes,
    }
    (out / f"lines-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
