"""Inside a process of a part: ``python -m benchmarks.gpu.worker PART FD STACK``.

Reads JSON lines from standard input: the settings, then an item with its seconds at a time. Writes to the file descriptor ``FD``: the
part's items first, then records, then "ended" for each item. What anything prints goes to the run's log. At SIGUSR1 it writes its stack
to the file descriptor ``STACK``, whatever it waits for.

``FACTORY_BENCH_GPU_PLANT=package.module`` is for tests, with --dry alone: the module is imported before the part, and may plant a broken
implementation into ``kernels.contract.registry.OPS``.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu import needs
from benchmarks.gpu.parts import PARTS, PLANT, Part, Settings
from benchmarks.support.waits import is_ours

FAULTS = (
    "CUDA error",
    "illegal memory access",
    "device-side assert",
    "misaligned address",
    "unspecified launch failure",
)

REFUSALS = ("CUBLAS_STATUS", "out of memory")  # also "CUDA error: …", after which the device goes on


class Context:
    """What an item is run with: the settings, its time, and where its findings go."""

    def __init__(self, part: Part, settings: Settings, out: IO[str]) -> None:
        self.part, self.settings = part, settings
        self.item = ""
        self.says = ""  # one line on how it went, for the person who watches
        self._out = out
        self._ends = 0.0

    def begin(self, item: str, seconds: float) -> None:
        self.item, self.says = item, ""
        self._ends = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that the item has; below zero it must stop, and says what it has not reached."""
        return self._ends - time.monotonic()

    def send(self, kind: str, **fields: Any) -> None:
        self._out.write(
            json.dumps({"kind": kind, "part": self.part.name, "item": self.item, **fields}, default=str) + "\n"
        )
        self._out.flush()

    def number(self, name: str, value: Any, unit: str = "", **more: Any) -> None:
        self.send("number", name=name, value=value, unit=unit, **more)

    def at(self, what: str, ours: bool = False) -> None:
        """What begins now: named where the process ends in it. ``ours``: a kernel of this repository's is timed."""
        self.send("at", what=what, ours=ours)

    def not_run(self, what: str, why: str) -> None:
        self.send("not run", what=what, why=why)

    def wrong(self, what: str, why: str) -> None:
        self.send("wrong", what=what, why=why)


def short(error: BaseException) -> str:
    """One line of an exception, compilers raise pages, and the line of this repository that it came through last."""
    if isinstance(error, subprocess.TimeoutExpired):  # its words are the whole command
        return f"a process took longer than {error.timeout:.0f} s"
    lines = str(error).strip().splitlines() or ["no message"]
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_ours(Path(frame.filename))]
    place = f" ({Path(own[-1].filename).relative_to(needs.ROOT)}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {lines[0][:300]}{place}"


def poisoned(error: BaseException) -> bool:
    """Is this process's device of no use after the error? A fault stays with the CUDA context, and all that follows raises too."""
    import torch

    refused = isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in REFUSALS)
    return not refused and any(fault in str(error) for fault in FAULTS)


def serve(part: Part, lines: IO[str], out: IO[str]) -> int:
    told = Settings(**json.loads(lines.readline()))
    settings = replace(told, device=told.device.partition(":")[0])  # which one, CUDA_VISIBLE_DEVICES says
    context = Context(part, settings, out)
    try:
        if settings.dry and (planted := os.environ.get(PLANT)):
            importlib.import_module(planted)
        module = importlib.import_module(f"benchmarks.gpu.{part.module or part.name}")
        items = module.items(settings)
    except ImportError as error:
        context.send("cannot", why=needs.why(error))
        return 0
    context.send("items", items=[asdict(item) for item in items])
    for line in lines:
        asked = json.loads(line)
        began = time.monotonic()
        context.begin(asked["item"], asked["seconds"])
        state = "done"
        try:
            module.run(asked["item"], context)
        except ImportError as error:
            state = "not run"
            context.says = needs.why(error)
            context.not_run(asked["item"], context.says)
        except Exception as error:  # compilers and drivers raise what they like: it costs this item
            traceback.print_exc()
            if poisoned(error):
                context.send("poisoned", why=short(error))
                return 1
            state = "failed"
            context.says = short(error)
            context.not_run(asked["item"], f"failed: {short(error)}")
        context.send("ended", state=state, seconds=time.monotonic() - began, says=context.says)
    return 0


def main(arguments: list[str]) -> int:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)  # the run's end, even by kill -9, is this process's
    (part,) = (part for part in PARTS if part.name == arguments[0])
    faulthandler.register(signal.SIGUSR1, file=int(arguments[2]), all_threads=True)
    with os.fdopen(int(arguments[1]), "w", encoding="utf-8") as out:
        return serve(part, sys.stdin, out)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of compilers may hold the interpreter
