"""Progress in a log: long work prints a line regularly, short work prints none."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from factory.core.console import Terminal, _PlainTask
from tests.support.patience import PATIENCE_S


def terminal() -> tuple[Terminal, io.StringIO]:
    out = io.StringIO()
    return Terminal(Console(file=out, force_terminal=False, width=200)), out


def test_work_that_reports_nothing_prints_a_line_regularly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_PlainTask, "EVERY", 0.01)
    made, out = terminal()
    deadline = time.monotonic() + PATIENCE_S
    with made.task("compiling"):
        while out.getvalue().count("compiling") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert out.getvalue().count("  compiling (") >= 2


def test_short_work_without_a_count_prints_nothing() -> None:
    made, out = terminal()
    with made.task("quick"):
        pass
    assert out.getvalue() == ""


def test_counted_work_prints_its_last_count() -> None:
    made, out = terminal()
    with made.task("steps", 3) as task:
        task.advance(3, "loss 1.0")
    assert "  steps 3/3 loss 1.0 (" in out.getvalue()


def test_an_error_ends_the_task_too() -> None:
    made, _ = terminal()
    with pytest.raises(RuntimeError), made.task("broken") as task:
        assert isinstance(task, _PlainTask)
        raise RuntimeError
    assert not task.beat.is_alive()


def test_a_line_is_printed_unchanged() -> None:
    """A path may contain text that rich reads as an emoji's name or as markup."""
    printer, out = terminal()
    printer.line("shard :100: of [bold]a[/bold]")
    assert out.getvalue() == "shard :100: of [bold]a[/bold]\n"
