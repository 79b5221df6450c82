"""An MLflow that does not answer costs little: found out within a limit of seconds, left alone for ten times as long, said once.

MLflow only shows. Whoever needs nothing from it goes on (``shown``), and a later pass sends what is missing (``factory.show.catching_up``).
The limit of one request is ``LEAST`` seconds; each request that takes longer doubles it, so that a server which is slow, and not dead, is heard in
the end.
"""

from __future__ import annotations

import math
import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from factory.core.errors import FactoryError, WorkspaceError
from factory.core.faults import fault_of

T = TypeVar("T")
LEAST, MOST = 5.0, 120.0  # seconds; MLflow's own limit is 120, seven times over
REST = 10.0  # times what a failure took, until MLflow is asked again
LIMITS = ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES")  # read at each request
NO_ANSWER = ("API request to", "timed out", "Max retries exceeded")  # of MlflowException's text
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
REPAIR = "'factory check --repair' (stop 'factory run' first) puts its backup back and sends again what is missing"


class TrackingError(FactoryError):
    """MLflow's store cannot be reached, read or written. Nothing in the ledger is lost."""

    exit_code = 8


@dataclass
class TrackingServer:
    """A tracking server, as this process found it."""

    limit: float = LEAST
    rests_until: float = 0.0  # of time.monotonic
    why: str = ""


_servers: dict[str, TrackingServer] = {}
_set_by_people = frozenset(name for name in LIMITS if name in os.environ)
_asked = ""  # the address that was asked last
_said: set[str] = set()  # addresses whose outage was said


def refuse_resting(uri: str) -> None:
    """Before each use of MLflow. Raises: TrackingError while a server that did not answer is left alone."""
    global _asked
    _asked = uri
    if not uri.startswith("http"):
        return
    server = _servers.setdefault(uri, TrackingServer())
    if (left := server.rests_until - time.monotonic()) > 0:
        raise TrackingError(f"MLflow at {uri} does not answer ({server.why}); it is asked again in {left:.0f} s")
    for name, value in zip(LIMITS, (math.ceil(server.limit), 0), strict=True):
        if name not in _set_by_people:
            os.environ[name] = str(value)


def note_failure(error: BaseException, seconds: float) -> None:
    """Was it the server that did not answer? Then it is left alone for a while."""
    if (server := _servers.get(_asked)) and any(word in str(error) for word in NO_ANSWER):
        server.rests_until, server.why = time.monotonic() + REST * seconds, f"for {seconds:.0f} s"
        server.limit = min(MOST, 2 * server.limit)


def advice(error: BaseException | None) -> str:
    """What a person does about an error, as the end of a message."""
    while error is not None:
        if isinstance(error, sqlite3.Error) and (
            getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGED or "no such table" in str(error)
        ):
            return f"; its database is damaged: {REPAIR}"
        error = error.__cause__ or error.__context__
    return ""


def of_one_thing(error: Exception) -> str:
    """What one thing alone met that was to be shown, in words: a run that a person deleted, a page that cannot be made. Others can be shown.

    Raises: ``error``, where it is a fault of the machine.
    """
    if not isinstance(error, FactoryError) and fault_of(error) is not None:
        raise error
    return str(error) if isinstance(error, FactoryError) else f"{type(error).__name__}: {error}"


def shown(say: Callable[[str], None], act: Callable[[], T]) -> T | None:
    """Do ``act``, which only shows something in MLflow; None when that cannot be done now. That is said once until MLflow is back."""
    try:
        done = act()
    except (TrackingError, WorkspaceError) as error:
        if _asked not in _said:
            say(f"  {error}. Training and releases go on, and MLflow gets later what it misses")
            _said.add(_asked)
        return None
    if _asked in _said:
        say(f"  MLflow at {_asked} answers again: it gets what it missed")
        _said.discard(_asked)
    return done
