"""An MLflow store without runs, made once for a state of the code: its migrations take a second of a core, and each workspace has one."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

from factory.show.mlflow import store
from tests.support.plants.kept import kept

_create = store._create_store


@functools.cache
def _empty() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        kept("mlflow", Path(folder) / "store", lambda at: _make(at, Path(folder) / "artifacts"), {})
        return (Path(folder) / "store" / "mlflow.db").read_bytes()


def _make(folder: Path, artifacts: Path) -> None:
    folder.mkdir()
    _create(folder / "mlflow.db", artifacts)


def copy_store(path: Path, artifacts: Path) -> None:
    """In place of ``store._create_store``. Whoever opens it writes the workspace's addresses into it."""
    if path.exists():
        return
    artifacts.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.new")
    aside.write_bytes(_empty())
    os.replace(aside, path)


def keep_one() -> None:
    """From now on this process copies each store."""
    store._create_store = copy_store
