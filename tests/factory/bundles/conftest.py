"""A bundle, made once for all tests here."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from factory.bundles.writing import BundleOptions, WrittenBundle, write_release_bundle
from tests.support.factory.exports import FilledPlant
from tests.support.plants.released_plant import released_plant


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FilledPlant]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield released_plant(tmp_path_factory.mktemp("released"), tasks=True)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def made(released: FilledPlant) -> WrittenBundle:
    return write_release_bundle(released, 2, BundleOptions(data=True))


@pytest.fixture
def bundle(made: WrittenBundle, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(made.folder, tmp_path / "bundle"))


@pytest.fixture
def own_key(released: FilledPlant) -> Path:
    return released.workspace.root / "keys" / "bundle-signing.pem"


@pytest.fixture
def published_key(released: FilledPlant) -> Path:
    return released.workspace.root / "keys" / "bundle-signing.pub.pem"
