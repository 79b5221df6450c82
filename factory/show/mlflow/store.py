"""The MLflow store of a workspace: making it, opening it, and its errors.

A store on SQLite is made in another file, set to WAL and then renamed, under a lock. Otherwise several processes that make the store at the same time
would crash, and a process killed during the migrations would leave a store that nothing can open.
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
from factory.show.mlflow.host_names import choose_server_names, make_mlflow_server_options
from factory.show.mlflow.outages import TrackingError as TrackingError
from factory.show.mlflow.outages import make_repair_advice, note_server_failure, refuse_during_outage

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

StoreVersion = tuple[int, object]  # the inode of a store's file, and the version of its schema
_engines: dict[
    str, tuple[StoreVersion, list[sa.Engine]]
] = {}  # by address: inode and schema at the last opening, and the engines
GC_SECONDS = 600.0
# MLflow reads these once, when it is imported: no usage reports, no progress lines, no git executable needed.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING": "false",  # so a trace is stored when the call returns
    # The server must not start processes for jobs. The factory uses no jobs, and each process imports all of MLflow.
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}


@contextmanager
def convert_mlflow_errors(doing: str) -> Iterator[None]:
    """Turn any error of MLflow or its database into a TrackingError. ``doing``: the work in the block, such as 'logging metrics'."""
    from mlflow.exceptions import MlflowException

    began = time.monotonic()
    try:
        yield
    except (MlflowException, sa.exc.SQLAlchemyError, sqlite3.Error, OSError) as error:
        note_server_failure(error, time.monotonic() - began)
        why = str(error).splitlines()[0] if str(error) else repr(error)
        raise TrackingError(
            "store.failed",
            "MLflow: {doing} failed: {reason}{advice}",
            doing=doing,
            reason=why,
            advice=make_repair_advice(error),
        ) from error


def open_client(workspace: Workspace) -> MlflowClient:
    """A client of the workspace's store, which is made if it is missing. MLflow then prints nothing and sends no usage reports.

    Raises: TrackingError when the store cannot be reached or has the schema of another MLflow version.
    """
    os.environ.update({key: value for key, value in ENVIRONMENT.items() if key not in os.environ})
    refuse_during_outage(workspace.mlflow_uri)
    from mlflow.tracking import MlflowClient

    # MLflow logs a traceback for every refused write and also raises the error. The error is enough.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    uri = workspace.mlflow_uri
    _read_migrations_once()
    with convert_mlflow_errors(f"opening {uri}"), workspace.hold_lock("mlflow", PATIENCE):
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
    """Cache the name of the newest migration. To find it, MLflow imports all seventy migrations each time it opens a store.

    The function is private to MLflow. A version without it works, but is slower.
    """
    from mlflow.store.db import utils

    find = getattr(utils, "_get_latest_schema_revision", None)
    if find is not None and not hasattr(find, "cache_info"):
        utils._get_latest_schema_revision = functools.cache(find)


def _relocate(connection: sqlite3.Connection, artifacts: Path) -> None:
    """Correct the addresses of artifacts if the workspace was moved, copied or restored elsewhere, because MLflow stores absolute ones."""
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


def check_store_writable(workspace: Workspace, patience: float = 1.0) -> None:
    """Check that an SQLite store can be written. MLflow itself waits 20 seconds for another process's lock; this function waits
    ``patience`` seconds.

    Raises: TrackingError.
    """
    path = _sqlite_path(workspace.mlflow_uri)
    if path and path.exists():
        with convert_mlflow_errors(f"writing to {path}"), closing(_connect(path, patience)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()


def flush_store(workspace: Workspace) -> None:
    """Flush the workspace's SQLite store to disk. Call this before the ledger records that MLflow has something.

    A server flushes by itself. Raises: TrackingError.
    """
    path = _sqlite_path(workspace.mlflow_uri)
    if path is None:
        return
    files, log = (
        [path, path.parent],
        path.with_name(f"{path.name}-wal"),
    )  # the log exists only while a connection is open
    with convert_mlflow_errors(f"flushing {path}"):
        logged = log.exists()
        if logged and flush_files_in_other_process([*files, log]):
            return
        if (logged and log.exists()) or not flush_files_in_other_process(
            files
        ):  # a log that is gone was first written into the database
            raise OSError(f"{path} could not be written to the disk")


def flush_files_in_other_process(files: Sequence[Path]) -> bool:
    """Flush files and folders in another process; returns whether that worked.

    This process must not open and close the files itself: closing any handle of a file drops all locks of the process on it (fcntl(2), "Advisory
    record locking"), also SQLite's. Another process could then remove the log to which this process still writes, and the database would be
    malformed (sqlite.org/howtocorrupt.html §2.2).
    """
    return subprocess.run(["sync", "--", *files], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


def purge_deleted_runs(workspace: Workspace, runs: Sequence[str]) -> None:
    """Remove deleted runs from an SQLite store for good, by MLflow's own command. A server does this by itself. Raises: TrackingError."""
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
        raise TrackingError(
            "store.slow_removal", "MLflow did not remove runs within {seconds:.0f} s", seconds=GC_SECONDS
        ) from None
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise TrackingError("store.not_removed", "MLflow could not remove runs: {reason}", reason=last_line)


def make_mlflow_ui_command(
    workspace: Workspace,
    port: int = 5000,
    host: str = "127.0.0.1",
    login: dict[str, str] | None = None,
    names: Sequence[str] = (),
) -> tuple[list[str], dict[str, str]]:
    """The command that serves the MLflow UI of this workspace, and the environment variables to add.

    ``login``: variables from ``factory.show.mlflow.login``. ``names``: the names by which people reach the UI, in the form
    that ``factory.show.mlflow.host_names`` parses. Raises: InputError.
    """
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", workspace.mlflow_uri]
    command += ["--default-artifact-root", workspace.mlflow_artifacts.as_uri()]
    command += ["--app-name", "basic-auth"] if login else []
    command += make_mlflow_server_options(choose_server_names(host, names), port)
    return command, ENVIRONMENT | (login or {})


def _sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def _connect(path: Path, patience: float) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.as_uri()}?mode=rw", timeout=patience, isolation_level=None, uri=True)


def _create_store(path: Path, artifacts: Path) -> None:
    """Make MLflow's tables in another file and rename it. An existing store is not changed."""
    if path.exists():
        return
    from mlflow.store.db.utils import _initialize_tables
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    aside = path.with_name(f".{path.name}.new")  # one process at a time, because the caller holds the lock
    for ending in ("", "-wal", "-shm", "-journal"):
        aside.with_name(aside.name + ending).unlink(missing_ok=True)  # left by a process that was killed here
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
    os.replace(aside, path)  # flush_store later flushes the new name too


def _flush_less(uri: str, artifacts: Path, seen: StoreVersion) -> None:
    """Let SQLite flush at checkpoints instead of at each commit. In WAL mode the store stays undamaged, and the factory sends again everything
    that a power cut loses. MLflow has no setting for this, but its clients share one engine for each address, which is changed here."""
    from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore as Registry
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore as Tracking

    known, engines = _engines.get(uri, (None, []))
    if known == seen:
        return
    for engine in engines:
        engine.dispose()  # closes connections to a file that was replaced
    engines = [Tracking(uri, artifacts.as_uri()).engine, Registry(uri).engine]
    for engine in engines:
        if not sa.event.contains(engine, "connect", _flush_at_checkpoints):
            sa.event.listen(engine, "connect", _flush_at_checkpoints)
            engine.dispose()  # closes connections made before the change
    _engines[uri] = seen, engines


def _flush_at_checkpoints(connection: sqlite3.Connection, _record: object) -> None:
    connection.execute("PRAGMA synchronous=NORMAL")


def _never_flush(connection: sqlite3.Connection, _record: object) -> None:
    connection.execute(
        "PRAGMA synchronous=OFF"
    )  # hundreds of commits; the whole file is flushed once, with the default experiment
    connection.execute("PRAGMA journal_mode=MEMORY")
