"""Stores the state of an agent's graph: in a SQLite file, or in a PostgreSQL database that may hold other tables."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from kernels.contract.message import CodedError

SETUP_LOCK = 0x61676E74  # key of pg_try_advisory_lock: one process at a time creates the tables


class SavedRunError(CodedError):
    """The checkpoints cannot be read or written. The message names the place and the remedy."""


@contextmanager
def open_checkpointer(saved: Path | str) -> Iterator[Any]:
    """A LangGraph checkpointer over a SQLite file, or over the database at a ``postgresql://`` address. Raises: SavedRunError."""
    with _sqlite(saved) if isinstance(saved, Path) else _postgres(saved) as saver:
        yield saver


def _plain() -> Any:
    from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

    return JsonPlusSerializer(allowed_msgpack_modules=None)  # plain values only


@contextmanager
def _sqlite(file: Path) -> Iterator[Any]:
    from langgraph.checkpoint.sqlite import SqliteSaver

    try:
        with closing(sqlite3.connect(file, check_same_thread=False, timeout=60)) as connection:
            connection.execute("PRAGMA synchronous=FULL")
            yield SqliteSaver(connection, serde=_plain())
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorname not in ("SQLITE_CORRUPT", "SQLITE_NOTADB"):
            raise
        raise SavedRunError(
            "loop.damaged_checkpoints",
            "{file} is damaged: {problem}. Delete the file. The run then starts again from its beginning.",
            file=str(file),
            problem=str(error),
        ) from error


@contextmanager
def _postgres(url: str) -> Iterator[Any]:
    """The tables have a schema of their own, named after the current one, because the ledger has a table ``checkpoints`` too."""
    import psycopg
    from langgraph.checkpoint.postgres import PostgresSaver
    from psycopg.rows import dict_row

    try:
        with psycopg.connect(url, autocommit=True, prepare_threshold=0, row_factory=dict_row) as connection:
            found = connection.execute("SELECT quote_ident(current_schema() || '_agents') AS name").fetchone()
            assert found is not None
            saver = PostgresSaver(connection, serde=_plain())
            # Polled: a waiting transaction would block the index that the other process makes.
            while not connection.execute("SELECT pg_try_advisory_lock(%s) AS had", (SETUP_LOCK,)).fetchone()["had"]:  # type: ignore[index]
                time.sleep(0.05)
            connection.execute(f"CREATE SCHEMA IF NOT EXISTS {found['name']}")  # type: ignore[arg-type]
            connection.execute(f"SET search_path TO {found['name']}")  # type: ignore[arg-type]
            saver.setup()
            connection.execute("SELECT pg_advisory_unlock(%s)", (SETUP_LOCK,))
            yield saver
    except psycopg.Error as error:
        raise SavedRunError(
            "loop.postgres",
            "The checkpoints in PostgreSQL cannot be used: {problem}. Run the same command again to continue the run.",
            problem=str(error).strip(),
        ) from error
