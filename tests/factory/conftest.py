from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from tests.support.plants.saved_plant import SavedPlant, saved_plant
from tests.support.plants.trained_plant import opened


@pytest.fixture(scope="session")
def isolates() -> None:
    """Skips where this machine allows no user namespaces. The system's own tool is asked, so that a fault of ours is no excuse."""
    done = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "true"], check=False)
    if done.returncode:
        pytest.skip("this machine allows no user namespaces")


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
