from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from factory.sandbox.sandbox import MECHANISMS
from tests.support.plants.saved_plant import SavedPlant, saved_plant
from tests.support.plants.trained_plant import opened


@functools.cache
def _cannot(name: str) -> str:
    """Why this machine cannot have a sandbox of this kind. The system's own tool is asked, so that a fault of ours is no excuse."""
    if name == "bubblewrap":
        return MECHANISMS[name].refusal()
    done = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "true"], check=False)
    return "" if done.returncode == 0 else "this machine allows no user namespaces"


@pytest.fixture(params=MECHANISMS)
def each_sandbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs once with every mechanism that isolates here."""
    if why := _cannot(request.param):
        pytest.skip(why)
    monkeypatch.setenv("FACTORY_SANDBOX", request.param)
    return str(request.param)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> SavedPlant:
    """A trained plant, made once for a module's tests."""
    return saved_plant(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def restored(saved_once: SavedPlant) -> Iterator[tuple[Workspace, Ledger]]:
    """That plant as it was made, for each test."""
    with saved_once.restored() as plant:
        yield plant


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Callable[..., tuple[Workspace, Ledger]]:
    """Copies the folder's ``saved`` plant to a folder of another name."""

    def copy(name: str = "elsewhere") -> tuple[Workspace, Ledger]:
        return opened(shutil.copytree(saved, tmp_path / name, symlinks=True))

    return copy
