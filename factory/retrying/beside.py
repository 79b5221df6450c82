"""Small things that the daemon does beside its work: in a thread of their own, so that neither waits for the other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from factory.core.errors import FactoryError
from factory.core.faults import fault_of
from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.retrying.steady import keep_traceback

END_SECONDS = 1.0  # that its last turn may take; then it ends with the process


@contextmanager
def beside(
    workspace: Workspace, progress: Progress, name: str, every: float, act: Callable[[], object]
) -> Iterator[None]:
    """Call ``act`` at once and then every so many seconds, while the block runs.

    What it raises is said once, until it works again, and ends nothing; what nobody expected leaves its traceback in ``logs/errors.log``.
    """
    over = threading.Event()

    def turns() -> None:
        said = ""
        while True:
            words = _failure(workspace, name, act)
            if words != said:
                said = words
                with contextlib.suppress(OSError, ValueError):  # a full disk takes no log, a terminal may be gone
                    progress.line(f"  {name} {f'failed: {words}; it is tried again' if words else 'works again'}")
            if over.wait(every):
                return

    thread = threading.Thread(target=turns, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(END_SECONDS)


def _failure(workspace: Workspace, name: str, act: Callable[[], object]) -> str:
    """In words; empty: it worked."""
    try:
        act()
    except FactoryError as error:
        return str(error)
    except Exception as error:
        if fault := fault_of(error):
            return f"{fault.says}: {fault.do}"
        log = workspace.logs / "errors.log"
        with contextlib.suppress(OSError):
            keep_traceback(log, name, error)
        return f"unexpected error, {type(error).__name__}: {str(error)[:300]} (traceback in {log})"
    return ""
