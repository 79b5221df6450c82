"""``python -m trainer FOLDER``: run the segment that FOLDER/segment.json specifies. Works under torchrun too.

``python -m trainer --wait FOLDER [FOLDER …]``: run one segment after the other in one process, each as soon as its segment.json exists.
The file FOLDER/ready says that the trainer waits for segment.json. Steps can then be timed apart from start-up and compilation.

Exit codes: 0 done · 2 the spec, recipe, data or a checkpoint is wrong · 74 the disk is full · 75 stopped by SIGTERM: start it
again to continue. Under torchrun, which hides exit codes, a rank leaves the file FOLDER/exit-CODE. On SIGTERM the trainer ends its step and
writes a checkpoint if both take no longer than a few seconds. Otherwise it ends at once, and resumes from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import time
from pathlib import Path

from trainer.contract import stopping
from trainer.contract.errors import EXIT_STOPPED

WAIT_SECONDS = 0.002


def main(arguments: list[str]) -> int:
    wait, folders = arguments[:1] == ["--wait"], parse_segment_folders(arguments)
    if "RANK" in os.environ:
        end_when_launcher_dies()
    if not folders or len(folders) > 1 and not wait or any(name.startswith("-") for name in arguments[wait:]):
        print(__doc__, file=sys.stderr)
        return 2
    from kernels.contract.host_memory import keep_freed_memory

    keep_freed_memory()
    from kernels.contract.op import KernelError
    from trainer.contract.errors import run_and_get_exit_code
    from trainer.segment import run_segment

    for folder in folders:
        if wait:
            wait_for_spec(folder)  # run_segment raises StoppedBySignalError if a signal ended the wait
        code = run_and_get_exit_code("trainer", functools.partial(run_segment, folder), KernelError, folder)
        if code:
            write_exit_code(folder, code)
            return code
    return 0


def parse_segment_folders(arguments: list[str]) -> list[Path]:
    """The segment folders that the command line names."""
    return [Path(name) for name in arguments[arguments[:1] == ["--wait"] :]]


def write_exit_code(folder: Path, code: int) -> None:
    """Under torchrun, write the exit code as the name of a file in ``folder``; else do nothing."""
    if "RANK" in os.environ:
        with contextlib.suppress(OSError):
            (folder / f"exit-{code}").touch()  # empty: a full disk takes it too


def end_when_launcher_dies() -> None:
    """Let the system kill this rank when its launcher dies. Otherwise it would train on while other ranks take its place."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def wait_for_spec(folder: Path) -> None:
    """Write FOLDER/ready; return as soon as segment.json exists (it is renamed into place, so it is complete), or on SIGTERM."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ready").touch()
    while not (folder / "segment.json").exists() and not stopping.is_stop_requested():
        time.sleep(WAIT_SECONDS)


if __name__ == "__main__":
    for given in parse_segment_folders(sys.argv[1:])[
        :1
    ]:  # of several folders any will do: the process that started us looks into all
        stopping.end_on_sigterm(before_exit=functools.partial(write_exit_code, given, EXIT_STOPPED))
    stopping.end_process(main(sys.argv[1:]))
