"""Benchmarks that fail are noted in the factory that ``$FACTORY_HOME`` names: its daemon judges merged patches again.

FACTORY_HOME=my-factory make bench
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    home = os.environ.get("FACTORY_HOME")
    failed = [report.nodeid for report in terminalreporter.getreports("failed")]
    if not home or not failed:
        return
    from factory.code_loop.revalidating import record_failed_benchmarks
    from factory.core.errors import FactoryError
    from factory.core.workspace import Workspace
    from factory.ledger.ledger import Ledger

    try:
        record_failed_benchmarks(Ledger.open(Workspace.open(Path(home)).ledger_url), failed)
        terminalreporter.write_line(
            f"{len(failed)} failed benchmarks noted in the factory in {home}: it judges its merged patches again"
        )
    except FactoryError as error:
        terminalreporter.write_line(f"failed benchmarks could not be noted in the factory in {home}: {error}")
