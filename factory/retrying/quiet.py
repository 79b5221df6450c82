"""Ends a tool of live code (an export, an average, a profile) that waits for ever: it uses no processor and writes nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from factory.retrying.backoff import in_words
from trainer.contract import stopping

POLL_SECONDS = 5.0


@contextmanager
def killed_when_quiet(process: int, seconds: float) -> Iterator[list[str]]:
    """Kill ``process`` and all that it started once they did nothing for so many seconds. Yields a list: what is in it then says so."""
    over, said = threading.Event(), list[str]()

    def watch() -> None:
        pause, quiet = min(POLL_SECONDS, seconds / 4), 0.0
        before: tuple[int, ...] = ()
        while not over.wait(pause):
            now = activity(process)
            quiet, before = quiet + pause if now == before else 0.0, now
            if quiet >= seconds and not over.is_set():
                said.append(f"killed: it used no processor and wrote nothing for {in_words(quiet)} (hung_seconds)")
                stopping.kill([process])
                return

    thread = threading.Thread(target=watch, name="quiet", daemon=True)
    thread.start()
    try:
        yield said
    finally:
        over.set()
        thread.join()


def activity(process: int) -> tuple[int, ...]:
    """(number of processes, processor time in ticks, bytes written) of a process and all that it started."""
    count = ticks = written = 0
    pending = [process]
    while pending:
        one = pending.pop()
        pending += stopping.children(one)
        with contextlib.suppress(OSError, ValueError, IndexError):  # it ended
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
            count += 1
            lines = Path(f"/proc/{one}/io").read_text().split("\n")
            written += sum(int(line.split()[1]) for line in lines if line.startswith("wchar"))
    return count, ticks, written
