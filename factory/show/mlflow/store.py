"""The MLflow store of a workspace: how it comes to be, how it is reached, what its failures are called.

A store on SQLite is built aside, set to WAL and renamed into place under a lock: several processes that initialise one
at the same time crash, and one killed half way through the migrations would leave a store that nothing can open.
"""

from __future__ import annotations

import functools
import logging
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa

from factory.core.workspace import PATIENCE, Workspace
from factory.show.mlflow.names import reached_as, server_options
from factory.show.mlflow.outages import TrackingError as TrackingError
from factory.show.mlflow.outages import advice, note_failure, refuse_resting

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

Seen = tuple[int, object]  # the inode of a store's file, and the version of its schema
_engines: dict[str, tuple[Seen, list[sa.Engine]]] = {}  # by address: the file as it was seen, and its engines
GC_SECONDS = 600.0
# Read once, when mlflow is imported: no usage reports, no model-registry chatter, no git executable needed.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING": "false",  # a trace is stored when the call returns, or sent again later
    # A server runs no jobs, which nothing here asks for: its runner and the consumers are processes that import all of MLflow.
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}


@contextmanager
def mlflow_errors(doing: str) -> Iterator[None]:
    """Whatever MLflow or its database raises becomes a TrackingError that says what was being done."""
    from mlflow.exceptions import MlflowException

    began = time.monotonic()
    try:
        yield
    except (MlflowException, sa.exc.SQLAlchemyError, sqlite3.Error, OSError) as error:
        note_failure(error, time.monotonic() - began)
        why = str(error).splitlines()[0] if str(error) else repr(error)
        raise TrackingError(f"MLflow: {doing} failed: {why}{advice(error)}") from error


def open_client(workspace: Workspace) -> MlflowClient:
    """A client of the workspace's store, which is made when it is not there; quiet, and without any usage report.

    Raises: TrackingError when the store cannot be reached or has the schema of another MLflow.
    """
    os.environ.update({key: value for key, value in ENVIRONMENT.items() if key not in os.environ})
    refuse_resting(workspace.mlflow_uri)
    from mlflow.tracking import MlflowClient

    # MLflow logs a traceback for every refused write and then raises it as well; once is enough.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    uri = workspace.mlflow_uri
    _read_migrations_once()
    with mlflow_errors(f"opening {uri}"), workspace.lock("mlflow", PATIENCE):
        if path := _sqlite_path(uri):
            _create_store(path, workspace.mlflow_artifacts)
            with closing(_connect(path, 1.0)) as connection:  # MLflow retries a broken file for 100 s
                schema = connection.execute("SELECT version_num FROM alembic_version").fetchone()
                _relocate(connection, workspace.mlflow_artifacts)
            _flush_less(uri, workspace.mlflow_artifacts, (path.stat().st_ino, schema))
        client = MlflowClient(uri, registry_uri=uri)
        client.search_experiments(max_results=1)  # connects, and refuses another schema
    return client


def _read_migrations_once() -> None:
    """Cache the name of the newest migration. MLflow imports all seventy to find it, for each store that it opens.

    The function is private to MLflow: a version without it is slower, and works.
    """
    from mlflow.store.db import utils

    find = getattr(utils, "_get_latest_schema_revision", None)
    if find is not None and not hasattr(find, "cache_info"):
        utils._get_latest_schema_revision = functools.cache(find)


def _relocate(connection: sqlite3.Connection, artifacts: Path) -> None:
    """MLflow keeps whole addresses of artifacts: of a workspace that was moved, copied or restored elsewhere they are written anew."""
    made = connection.execute("SELECT artifact_location FROM experiments WHERE experiment_id = 0").fetchone()
    old, new = (made[0] if made else "").removesuffix("/0"), artifacts.as_uri()
    if not old.startswith("file:") or old == new:
        return
    connection.execute("BEGIN IMMEDIATE")
    for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        for column in [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")').fetchall()]:
            connection.execute(
                f'UPDATE "{table}" SET "{column}" = ? || substr("{column}", ?) WHERE substr("{column}", 1, ?) = ?',
                [f"{new}/", len(old) + 2, len(old) + 1, f"{old}/"],
            )
    connection.execute("COMMIT")


def check_writable(workspace: Workspace, patience: float = 1.0) -> None:
    """Find out within ``patience`` seconds that another process holds an SQLite store's write lock; MLflow itself waits 20.

    Raises: TrackingError.
    """
    path = _sqlite_path(workspace.mlflow_uri)
    if path and path.exists():
        with mlflow_errors(f"writing to {path}"), closing(_connect(path, patience)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()


def flush(workspace: Workspace) -> None:
    """Return once all that the workspace's SQLite store was given is on disk: before the ledger says that MLflow has it.

    A server does that by itself. Raises: TrackingError.
    """
    path = _sqlite_path(workspace.mlflow_uri)
    if path is None:
        return
    files, log = [path, path.parent], path.with_name(f"{path.name}-wal")  # there is none without a connection
    with mlflow_errors(f"flushing {path}"):
        logged = log.exists()
        if logged and sync_elsewhere([*files, log]):
            return
        if (logged and log.exists()) or not sync_elsewhere(
            files
        ):  # a log that went left all that it held in the database
            raise OSError(f"{path} could not be written to the disk")


def sync_elsewhere(files: Sequence[Path]) -> bool:
    """Flush files and folders; did that work?

    Another process does it: a process that closes any handle of a file loses all its locks of that file (fcntl(2), "Advisory record locking"),
    SQLite's among them. Whoever then closes the database as the last one, as it seems, removes the log to which this process goes on
    writing, and the database is malformed (sqlite.org/howtocorrupt.html §2.2).
    """
    return subprocess.run(["sync", "--", *files], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


def remove_deleted(workspace: Workspace, runs: Sequence[str]) -> None:
    """Remove deleted runs from an SQLite store for good, by MLflow's own command; a server does that by itself. Raises: TrackingError."""
    uri = workspace.mlflow_uri
    if _sqlite_path(uri) is None or not runs:
        return
    words = ["-m", "mlflow", "gc", "--backend-store-uri", uri, "--tracking-uri", uri, "--run-ids", ",".join(runs)]
    try:
        done = subprocess.run(
            [sys.executable, *words], env=os.environ | ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=GC_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TrackingError(f"MLflow: removing runs took longer than {GC_SECONDS:.0f} s") from None
    if done.returncode:
        raise TrackingError(f"MLflow: removing runs failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")


def ui_command(
    workspace: Workspace,
    port: int = 5000,
    host: str = "127.0.0.1",
    login: dict[str, str] | None = None,
    names: Sequence[str] = (),
) -> tuple[list[str], dict[str, str]]:
    """The command that opens the MLflow UI on this workspace, and the environment to add to one's own.

    ``login``: of ``factory.show.mlflow.login``. ``names``: by which people reach it, as ``factory.show.mlflow.names`` reads them. Raises: InputError.
    """
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", workspace.mlflow_uri]
    command += ["--default-artifact-root", workspace.mlflow_artifacts.as_uri()]
    command += ["--app-name", "basic-auth"] if login else []
    command += server_options(reached_as(host, names), port)
    return command, ENVIRONMENT | (login or {})


def _sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def _connect(path: Path, patience: float) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.as_uri()}?mode=rw", timeout=patience, isolation_level=None, uri=True)


def _create_store(path: Path, artifacts: Path) -> None:
    """Make MLflow's tables in a file aside and rename it into place; a store that is there is left alone."""
    if path.exists():
        return
    from mlflow.store.db.utils import _initialize_tables
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    aside = path.with_name(f".{path.name}.new")  # one at a time: the caller holds the lock
    for ending in ("", "-wal", "-shm", "-journal"):
        aside.with_name(aside.name + ending).unlink(missing_ok=True)  # of a process that was killed here
    artifacts.mkdir(parents=True, exist_ok=True)
    engine = sa.create_engine(f"sqlite:///{aside}")
    sa.event.listen(engine, "connect", _never_flush)
    _initialize_tables(engine)
    engine.dispose()
    SqlAlchemyStore(
        f"sqlite:///{aside}", artifacts.as_uri()
    ).engine.dispose()  # the default experiment: its commit flushes the file
    with closing(_connect(aside, PATIENCE)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    os.replace(aside, path)  # its name is flushed with what the ledger says that it holds ('flush')


def _flush_less(uri: str, artifacts: Path, seen: Seen) -> None:
    """Let SQLite flush at checkpoints and not at each commit: in WAL the store stays whole, and the ledger can fill in what a
    power cut takes. MLflow has no setting for it, but one engine for each address, which its clients share."""
    from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore as Registry
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore as Tracking

    known, engines = _engines.get(uri, (None, []))
    if known == seen:
        return
    for engine in engines:
        engine.dispose()  # connections to a file that another one took the place of; a new store would ask through them
    engines = [Tracking(uri, artifacts.as_uri()).engine, Registry(uri).engine]
    for engine in engines:
        if not sa.event.contains(engine, "connect", _flush_at_checkpoints):
            sa.event.listen(engine, "connect", _flush_at_checkpoints)
            engine.dispose()  # the connections from before
    _engines[uri] = seen, engines


def _flush_at_checkpoints(connection: sqlite3.Connection, _record: object) -> None:
    connection.execute("PRAGMA synchronous=NORMAL")


def _never_flush(connection: sqlite3.Connection, _record: object) -> None:
    connection.execute(
        "PRAGMA synchronous=OFF"
    )  # hundreds of commits; the whole file is flushed once, with the default experiment
    connection.execute("PRAGMA journal_mode=MEMORY")
