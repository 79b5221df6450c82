"""Limits the cost of an MLflow server that does not answer: a time limit per request, a pause after a failure, and one line for a person.

MLflow only shows things, so the factory works without it (``show_unless_outage``), and a later pass sends everything that is missing
(``factory.show.unshown_items``). The limit of one request is ``LEAST`` seconds. Each request that takes longer doubles the limit, so that a
slow server is reached in the end. After a failure the server is not asked for ten times as long as the failed request took.
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
from factory.core.faults import find_fault_in
from kernels.contract.message import Message

T = TypeVar("T")
LEAST, MOST = 5.0, 120.0  # seconds; MLflow itself waits 120 s, seven times
PAUSE_FACTOR = 10.0  # pause after a failure, as a multiple of the time that the failed request took
LIMITS = ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES")  # MLflow reads them at each request
NO_ANSWER = ("API request to", "timed out", "Max retries exceeded")  # parts of the text of an MlflowException
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class TrackingError(FactoryError):
    """MLflow's store cannot be reached, read or written. Nothing in the ledger is lost."""

    exit_code = 8


@dataclass
class TrackingServer:
    """The state of a tracking server, as far as this process knows it."""

    request_limit: float = LEAST
    pause_until: float = 0.0  # in time.monotonic()
    why: str = ""


_servers: dict[str, TrackingServer] = {}
_set_by_people = frozenset(name for name in LIMITS if name in os.environ)
_asked = ""  # the address that was used last
_said: set[str] = set()  # addresses whose outage was printed


def refuse_during_outage(uri: str) -> None:
    """Call before each use of MLflow. Raises: TrackingError during the pause after a server did not answer."""
    global _asked
    _asked = uri
    if not uri.startswith("http"):
        return
    server = _servers.setdefault(uri, TrackingServer())
    if (left := server.pause_until - time.monotonic()) > 0:
        raise TrackingError(
            "outages.no_answer",
            "MLflow at {address} does not answer ({reason}). The factory tries again in {seconds:.0f} s",
            address=uri,
            reason=server.why,
            seconds=left,
        )
    for name, value in zip(LIMITS, (math.ceil(server.request_limit), 0), strict=True):
        if name not in _set_by_people:
            os.environ[name] = str(value)


def note_server_failure(error: BaseException, waited_seconds: float) -> None:
    """Note an error of MLflow. If the server did not answer, it is not asked for a while."""
    if (server := _servers.get(_asked)) and any(word in str(error) for word in NO_ANSWER):
        server.pause_until, server.why = time.monotonic() + PAUSE_FACTOR * waited_seconds, f"for {waited_seconds:.0f} s"
        server.request_limit = min(MOST, 2 * server.request_limit)


def make_repair_advice(error: BaseException | None) -> str:
    """Advice about an error, as the end of a message; '' if no special advice exists."""
    while error is not None:
        if isinstance(error, sqlite3.Error) and (
            getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGED or "no such table" in str(error)
        ):
            return Message(
                "outages.damaged",
                " (MLflow's database is damaged. Stop 'factory run'. Then restore the database's backup and send everything that is "
                "missing: 'factory check --repair')",
            )
        error = error.__cause__ or error.__context__
    return ""


def describe_single_failure(error: Exception) -> str:
    """The text of an error that concerns one thing to show, such as a deleted run or a page that cannot be made.

    Raises: ``error``, if it is a fault of the machine, which concerns all things.
    """
    if not isinstance(error, FactoryError) and find_fault_in(error) is not None:
        raise error
    return str(error) if isinstance(error, FactoryError) else f"{type(error).__name__}: {error}"


def show_unless_outage(say: Callable[[str], None], act: Callable[[], T]) -> T | None:
    """Call ``act``, which only shows something in MLflow. Return None if MLflow does not answer. Each outage is printed once."""
    try:
        done = act()
    except (TrackingError, WorkspaceError) as error:
        if _asked not in _said:
            say(
                Message(
                    "outages.away",
                    "  {reason}. Training and releases continue. The factory sends the missing data to MLflow later.",
                    reason=error,
                )
            )
            _said.add(_asked)
        return None
    if _asked in _said:
        say(
            Message(
                "outages.back",
                "  MLflow at {address} answers again. The factory sends the missing data now.",
                address=_asked,
            )
        )
        _said.discard(_asked)
    return done
