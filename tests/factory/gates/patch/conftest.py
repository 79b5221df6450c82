"""One plan of tiny runs, and the baseline's first run, for all tests of the matrix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.factory.matrix import Prepared, prepare


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    with ExitStack() as after:
        yield prepare(tmp_path_factory.mktemp("matrix"), after, ["first steps"])
