"""Real parts for every test: a real workspace with a real SQLite ledger, and a real git repository that holds this checkout's code."""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import torch
import typer.testing

from factory.core import devices
from factory.core.workspace import Workspace, WorkspaceConfig
from factory.ledger.ledger import Ledger
from tests.support import postgres_server
from tests.support.factory.code_loop import make_target
from tests.support.forks import quick
from tests.support.paths import ROOT
from tests.support.plants.kept_ledger import keep_ledger
from tests.support.plants.kept_store import keep_one

# Started in the background by a shell, a process has interrupts ignored, and so have its children: tests send them some.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):  # no test asks the model of whoever runs it
    os.environ.pop(name, None)
# Tests compile hundreds of kernels, mostly outside a sandbox: a precompiled header is worth its seconds.
for name, value in (devices.COMPILER_SETTINGS | {devices.PRECOMPILE_HEADERS: "1"}).items():
    os.environ.setdefault(name, value)
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    # What another kind of CPU, or a process that was killed, left in the cache that torch shares between all programs of a
    # user can end a test. One for the whole suite: its workers and their children take it over.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="factory-tests-compiled-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: a second thread only waits, and workers share the cores
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # it was imported above, before this was said


keep_one()
keep_ledger()
# The tree of commands is made once: 17 ms, and tests call hundreds of commands in this process.
typer.testing._get_command = functools.cache(typer.testing._get_command)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="write the files of tests/golden/ again")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A slow or long test says why. A sample names cases of its test: the others become long."""
    report = yield
    tests = [item for item in report.result or () if isinstance(item, pytest.Item)]
    marks = [(item.nodeid, mark) for item in tests for name in ("slow", "long") for mark in item.iter_markers(name)]
    wrong = [
        f"{name}: slow or long without a reason, as in @pytest.mark.slow('two whole gate runs')"
        for name, mark in marks
        if not (mark.args and str(mark.args[0]).strip())
    ]
    samples: dict[str, tuple[pytest.Mark, set[str]]] = {}
    for item in tests:
        if sample := item.get_closest_marker("sample"):
            name, _, case = item.name.removesuffix("]").partition("[")
            samples.setdefault(name, (sample, set()))[1].add(case)
            if case not in sample.args:
                item.add_marker(pytest.mark.long(f"of its cases, these run in its own tier: {', '.join(sample.args)}"))
            elif item.get_closest_marker("long"):
                wrong.append(f"{item.nodeid}: a case of a sample is long")
    for name, (sample, cases) in samples.items():
        if not sample.args or set(sample.args) - cases:
            named = ", ".join(sorted(set(sample.args) - cases)) or "nothing"
            wrong.append(f"{name}: its sample names {named}; its cases are: {', '.join(sorted(cases))}")
    if wrong:
        report.outcome, report.result, report.longrepr = "failed", [], "\n".join(wrong)
    return report


# Files with a test of some minutes: one that is begun last leaves the other worker idle.
LONGEST = (
    "test_demo.py", "test_honest_patches.py", "test_engineering.py", "test_coverage.py", "test_story.py",
    "test_matrix_attacks.py", "test_rounding.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, the longest before the others, each whole: what is left at the end is short, and workers can share it."""
    slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("long")}
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (item.path not in slow, rank.get(item.path.name, len(LONGEST))))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    quick.of(item)


def pytest_collection_finish() -> None:
    gc.freeze()  # what collection made stays to the end: half a million objects less to walk at each full collection of garbage


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A run that left out what needs a server says so where nobody overlooks it."""
    why = postgres_server.missing()
    skipped = [report for report in terminalreporter.stats.get("skipped", ()) if why and why in str(report.longrepr)]
    if skipped:
        terminalreporter.section("PostgreSQL", red=True, bold=True)
        terminalreporter.line(
            f"{len(skipped)} PostgreSQL tests did not run: {why}; 'make setup-dev' brings a server", red=True, bold=True
        )


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.create(tmp_path / "workspace")


@pytest.fixture
def ledger(workspace: Workspace) -> Ledger:
    return Ledger.create(workspace.ledger_url)


@pytest.fixture(scope="session")
def code_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working tree's patchable code, committed to a repository of its own: tests see uncommitted changes, and touch no real branch."""
    return make_target(tmp_path_factory.mktemp("code") / "repository")


@pytest.fixture
def plant(tmp_path: Path, code_repository: Path) -> Workspace:
    """A workspace with a ledger, the tiny recipe, and code of its own to train with."""
    workspace = Workspace.create(tmp_path / "plant", WorkspaceConfig(recipe="tiny", repository=str(code_repository)))
    shipped = (ROOT / "policies" / "data.yaml").read_text()
    (workspace.root / "policies" / "data.yaml").write_text(shipped.replace("vocab_size: 4096", "vocab_size: 512"))
    Ledger.create(workspace.ledger_url)
    return workspace


@pytest.fixture(scope="session")
def postgres() -> Iterator[Callable[[], str]]:
    """Makes a new database in a real server, and tells its address."""
    if why := postgres_server.missing():
        pytest.skip(why)
    with postgres_server.server() as address:
        names = (f"factory_{number}" for number in itertools.count())
        yield lambda: postgres_server.new_database(address, next(names))
