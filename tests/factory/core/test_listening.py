"""A taken port is one line, before anything is started."""

from __future__ import annotations

import socket

import pytest

from factory.core.errors import InputError
from factory.core.listening import listen
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from tests.support.factory.command import factory


def test_an_address_that_is_free_can_be_had_again_at_once() -> None:
    first = listen("127.0.0.1", 0)
    port = first.getsockname()[1]
    with pytest.raises(InputError, match=f"^127.0.0.1:{port} cannot be listened on: Address already in use"):
        listen("127.0.0.1", port)
    first.close()
    listen("127.0.0.1", port).close()
    with pytest.raises(InputError, match="203.0.113.7:0 cannot be listened on: Cannot assign requested address"):
        listen("203.0.113.7", 0)  # of documentation: no machine's


def test_the_ui_on_a_taken_port_is_refused_before_anything_starts(workspace: Workspace, ledger: Ledger) -> None:
    files = lambda: sorted(path.name for path in workspace.root.rglob("*") if "ledger.db" not in path.name)
    before = files()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = factory("ui", "--port", str(port), "--user", "ada", "-w", str(workspace.root))
    says = (
        f"factory: 127.0.0.1:{port} cannot be listened on: Address already in use; name another with --host or --port\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", says) and files() == before
