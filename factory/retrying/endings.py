"""How a trainer ended: crashed, was killed, ran out of memory, hung. From its exit, its log, and the kernel's count of what it killed for memory."""

from __future__ import annotations

import contextlib
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from factory.core.launching import EXIT_DISK_FULL, EXIT_STOPPED

HUNG, OUT_OF_MEMORY, KILLED, CRASHED, FAILED = "hung", "out of memory", "killed", "crashed", "failed"
# As torchrun writes them, or code that lies: no number is longer than that of a signal or an exit.
OF_A_RANK = re.compile(r"Signal (\d{1,3}) \(SIG\w+\) received by PID \d+|exitcode\s*: -(\d{1,3}) ")
CODE_OF_A_RANK = re.compile(r"exitcode\s*: (-?\d{1,3}) ")
NO_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|Cannot allocate memory|MemoryError|bad_alloc"
)


@dataclass(frozen=True)
class Ending:
    kind: str  # one of the above
    says: str  # follows 'segment 3'


def oom_kills() -> int | None:
    """How many processes of this machine the kernel's OOM killer has ended since it was started; None where the kernel doesn't tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


def ending_of(code: int, line: str, log: str, kills_before: int | None) -> Ending:
    """code: of the trainer, −n after signal n. line: the one of its log that explains most. log: its end.

    >>> ending_of(1, "trainer: no", "", None)
    Ending(kind='failed', says='ended with exit 1: trainer: no')
    """
    cause = f": {line}" if line else ""
    if code == EXIT_STOPPED:
        if all(int(other) in (EXIT_STOPPED, -signal.SIGTERM) for other in CODE_OF_A_RANK.findall(log)):
            return Ending(KILLED, f"was stopped by somebody else (SIGTERM), and not by this factory{cause}")
        code = 1  # torchrun stopped the others because one had failed
    if code == EXIT_DISK_FULL:
        return Ending(FAILED, f"says that the disk is full, but there is room for its checkpoints{cause}")
    if code == -signal.SIGTERM:
        return Ending(KILLED, "was ended by somebody else (SIGTERM), and not by this factory")
    number = _signal(code, log)
    if number == signal.SIGKILL:
        kills = oom_kills()
        if kills is not None and kills_before is not None and kills > kills_before:
            return Ending(
                OUT_OF_MEMORY,
                "was ended by the kernel's OOM killer (SIGKILL): the machine or its control group has too little memory",
            )
        return Ending(KILLED, "was killed by somebody else (SIGKILL), and not by this machine's OOM killer")
    if code > 0 and NO_MEMORY.search(line):
        return Ending(OUT_OF_MEMORY, f"ended with exit {code}, out of memory{cause}")
    if number:
        return Ending(CRASHED, f"ended with signal {_name(number)}{cause}")
    return Ending(FAILED, f"ended with exit {code}{cause}")


def _signal(code: int, log: str) -> int:
    """That ended the trainer, or the first of its ranks as torchrun reports it; 0: none."""
    if code < 0:
        return -code
    found = OF_A_RANK.search(log) if code == 1 else None
    return int(found.group(1) or found.group(2)) if found else 0


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
