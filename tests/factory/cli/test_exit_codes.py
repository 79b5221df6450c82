"""Each exit code has one meaning, and the documentation lists all of them. It also lists the reasons why ``factory run`` does not start."""

from __future__ import annotations

import ast
import errno
import functools
import os
import re
import signal
import socket
import sqlite3
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from factory.cli.app import print_error_and_get_exit_code
from factory.core import faults, file_lock
from factory.core.faults import Fault
from factory.core.workspace import Workspace
from factory.duties import back_off
from factory.ledger.ledger import Ledger
from tests.support.factory.at_work import at_work
from tests.support.factory.command import command_here
from tests.support.paths import ROOT

# Errors that share a number because they share its meaning: what a person gave is wrong; a fault of the machine (``faults``).
SHARED = [{"ConfigError", "InputError", "RepositoryError", "TaskError"}]
FAULTS = {one.exit_code for one in vars(faults).values() if isinstance(one, Fault)}
OF_FAULTS = {"DiskFullError", "NoMemoryError"}
OTHERS = {0, 141, *(128 + int(one) for one in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))}


@functools.cache
def numbered() -> dict[int, set[str]]:
    """By exit code, the subclasses of FactoryError, and itself, that set it. Read from the source: to import all takes long."""
    parents: dict[str, set[str]] = {}
    found: dict[int, set[str]] = defaultdict(set)
    for path in (ROOT / "factory").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                parents[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
                for line in node.body:
                    if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "exit_code":
                        found[ast.literal_eval(line.value)].add(node.name)

    def is_ours(name: str) -> bool:
        return name == "FactoryError" or any(map(is_ours, parents.get(name, ())))

    assert all(is_ours(name) for names in found.values() for name in names), found
    return found


def section(title: str) -> str:
    text = (ROOT / "docs" / "OPERATING.md").read_text()
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_each_exit_code_has_one_meaning() -> None:
    for number, names in numbered().items():
        assert len(names) == 1 or names in SHARED or (number in FAULTS and names <= OF_FAULTS), (number, names)
        assert number not in FAULTS or names <= OF_FAULTS, f"{number} is that of a fault of the machine"
        assert number not in OTHERS


def test_the_documented_table_lists_exactly_the_used_exit_codes() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \|", section("Exit codes"), re.MULTILINE)
    listed = [int(number) for row in rows for number in row.split(",")]
    assert sorted(listed) == sorted({*numbered(), *FAULTS, *OTHERS})


# -- why the daemon cannot begin ---------------------------------------------------------------------------------------
def _write(name: str, text: str) -> Callable[[Workspace], None]:
    return lambda workspace: void((workspace.root / name).write_text(text))


def void(_: object) -> None:
    pass


def _other_version(number: int) -> Callable[[Workspace], None]:
    def change(workspace: Workspace) -> None:
        with closing(sqlite3.connect(workspace.root / "ledger.db")) as ledger:
            ledger.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (str(number),))
            ledger.commit()

    return change


def _damage(workspace: Workspace) -> None:
    for path in workspace.root.glob("ledger.db-*"):
        path.unlink()
    (workspace.root / "ledger.db").write_bytes(b"nothing of SQLite's" * 500)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda workspace: workspace.root.rename(workspace.root.with_name("away")), "… is not a workspace"),
        (lambda workspace: (workspace.root / "factory.yaml").unlink(), "factory.yaml is missing"),
        (_write("factory.yaml", "version: 9\n"), "… is a workspace of version …"),
        (lambda workspace: (workspace.root / "ledger.db").unlink(), "there is no ledger at …"),
        (_damage, "the ledger is damaged"),
        (_other_version(1), "the ledger at … is of version …"),
        (_other_version(99), "the ledger at … is of version …"),
        (_write("factory.yaml", "recpie: demo\n"), "factory.yaml: unknown key …"),
        (_write("factory.yaml", "ranks: many\n"), "factory.yaml: KEY must be …"),
    ],
)
def test_the_daemon_does_not_start_with_a_broken_workspace(
    workspace: Workspace, ledger: Ledger, fault: Callable[[Workspace], None], says: str
) -> None:
    (workspace.shards / "one").touch()  # a factory's work, so that what is gone is missed
    ledger.engine.dispose()
    fault(workspace)
    error = command_here("run", home=workspace).exception
    assert error is not None
    refused(says, print_error_and_get_exit_code(error), str(error))


def refused(says: str, code: int | None, message: str) -> None:
    """As the table has it."""
    (row,) = (line for line in section("When `factory run` does not start").splitlines() if f"`{says}`" in line)
    assert code == int(row.split("|")[2]), message
    words = re.escape(says).replace("…", ".*").replace("KEY", "[a-z_]+")
    assert re.search(words, message), message


def test_the_daemon_does_not_start_beside_another(workspace: Workspace, ledger: Ledger) -> None:
    with at_work(workspace) as process:
        error = command_here("run", home=workspace).exception
    assert error is not None and f"process {process} holds" in str(error)
    refused(
        "… is in use: process N holds model-loop.lock",
        print_error_and_get_exit_code(error),
        str(error).replace(str(process), "N"),
    )


def test_the_daemon_does_not_start_if_its_port_is_taken(workspace: Workspace, ledger: Ledger) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        (workspace.root / "factory.yaml").write_text(f"metrics_port: {taken.getsockname()[1]}\n")
        error = command_here("run", home=workspace).exception
    assert error is not None
    refused(
        "The factory cannot listen on port … (metrics_port in …/factory.yaml)",
        print_error_and_get_exit_code(error),
        str(error),
    )


@pytest.mark.parametrize(("number", "says"), [("ENOSPC", "the disk is full"), ("EROFS", "writing is not permitted")])
def test_the_daemon_waits_if_a_fault_of_the_machine_hides_its_lock(
    workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, number: str, says: str
) -> None:
    opened, waits = os.open, list[float]()

    def refuses(path: object, *words: object) -> int:
        if Path(str(path)).name == "model-loop.lock":
            raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)), str(path))
        return opened(path, *words)  # type: ignore[arg-type]

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise SystemExit

    monkeypatch.setattr(file_lock.os, "open", refuses)
    monkeypatch.setattr(back_off.time, "sleep", sleep)
    said = command_here("run", home=workspace).output
    monkeypatch.undo()
    assert waits == [1.0, 2.0, 4.0]
    assert (
        said.count(f"{says} ({workspace.root / 'model-loop.lock'}): ") == 1 and said.count("The factory waits") == 1
    ), said
