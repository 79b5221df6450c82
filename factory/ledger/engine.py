"""Makes connections to SQLite and PostgreSQL. Their settings make a ledger behave the same on both."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from factory.core.errors import WorkspaceError
from factory.core.workspace import list_factory_files
from factory.ledger.version import GONE
from kernels.contract.message import Message

DRIVER = Message(
    "engine.install_driver",
    "PostgreSQL needs the extra 'postgres': pip install 'llm-factory[postgres]'",
)
WRITERS_LOCK = 0x6C656467  # the number for pg_advisory_xact_lock
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# SQLite counts rows only for the type INTEGER PRIMARY KEY.
ROW_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


class NulSafeText(sa.TypeDecorator[str]):
    """A column type for text that PostgreSQL accepts. Names in shards may contain NUL, which is stored as U+FFFD. A ``Subject`` is stored as text."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str | None:
        return None if value is None else str(value).replace("\0", "\ufffd")


def make_engine(url: str) -> sa.Engine:
    """Return an engine for the database at ``url``. Write transactions run one after another. Raises: WorkspaceError."""
    try:
        address = sa.make_url(url)
        if address.drivername == "postgresql":  # SQLAlchemy 2.0 and 2.1 have different default drivers
            address = address.set(drivername="postgresql+psycopg")
        embedded = address.get_backend_name() == "sqlite"
        more: dict[str, Any] = {"connect_args": {"timeout": 60}} if embedded else {"pool_pre_ping": True}
        made = sa.create_engine(address, **more)
    except ImportError as error:
        raise WorkspaceError(
            "engine.no_driver",
            "the database of ledger_url ({scheme}://…) has no driver on this machine ({why}). {advice}",
            scheme=url.split("://")[0],
            why=str(error),
            advice=DRIVER,
        ) from error
    except sa.exc.ArgumentError as error:
        raise WorkspaceError(
            "engine.bad_address",
            "ledger_url is not valid: {why}. The address must be sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE",
            why=str(error),
        ) from error
    if embedded:
        sa.event.listen(made, "connect", _pragmas)
        sa.event.listen(made, "handle_error", _say_if_damaged)
    sa.event.listen(made, "begin", _begin)
    return made


def _begin(connection: sa.Connection) -> None:
    """Take the writers' lock when a write transaction begins. The transaction therefore reads no rows that another writer is about to change."""
    writes = not connection.get_execution_options().get("reads_only", False)
    if connection.dialect.name == "sqlite":
        # pysqlite begins transactions late and deferred. Two writers that take the lock late would deadlock.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
    else:
        lock = f"SELECT pg_advisory_xact_lock({WRITERS_LOCK})"
        connection.exec_driver_sql(lock if writes else "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")


def _pragmas(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # only the BEGIN above begins a transaction
    cursor = connection.cursor()
    try:
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=60000"):
            cursor.execute(f"PRAGMA {pragma}")
    except sqlite3.Error as error:
        raise_if_damaged(error)
        raise
    finally:
        cursor.close()


def get_sqlite_file(url: str) -> Path | None:
    """Return the file of an SQLite address, or None for another database."""
    return Path(url.removeprefix("sqlite:///")).resolve() if url.startswith("sqlite:///") else None


def check_ledger_exists(file: Path, root: Path) -> None:
    """Raise WorkspaceError if the workspace ``root`` has no ledger. SQLite would make an empty ledger."""
    if not file.exists() or not file.stat().st_size:
        known = [name for name in list_factory_files(root) if not name.endswith(".db")]
        init = Message("engine.run_init", "The workspace is empty: finish it with 'factory init'")
        raise WorkspaceError(
            "engine.no_ledger", "there is no ledger at {file}. {advice}", file=file, advice=GONE if known else init
        )


def raise_if_damaged(error: BaseException | None) -> None:
    """Raise WorkspaceError if SQLite's ``error`` means that the ledger's file is damaged."""
    if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGED:
        raise WorkspaceError(
            "engine.damaged", "the ledger is damaged ({why}). {advice}", why=str(error), advice=GONE
        ) from error


def _say_if_damaged(context: sa.ExceptionContext) -> None:
    raise_if_damaged(context.original_exception)
