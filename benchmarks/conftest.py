"""What a run of the suite saw fall is told to the factory that ``$FACTORY_HOME`` names: its daemon judges merged patches again.

FACTORY_HOME=my-factory make bench
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

fallen: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and report.when == "call":
        fallen.append(report.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    home = os.environ.get("FACTORY_HOME")
    if not home or not fallen:
        return
    from factory.code_loop.revalidating import benchmarks_fell
    from factory.core.errors import FactoryError
    from factory.core.workspace import Workspace
    from factory.ledger.ledger import Ledger

    try:
        benchmarks_fell(Ledger.open(Workspace.open(Path(home)).ledger_url), fallen)
        terminalreporter.write_line(f"{len(fallen)} told to the factory in {home}: it judges its merged patches again")
    except FactoryError as error:
        terminalreporter.write_line(f"the factory in {home} could not be told: {error}")
