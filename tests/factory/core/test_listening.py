"""An address that is not available is an error of one line, before anything starts."""

from __future__ import annotations

import socket

from factory.core.errors import InputError
from factory.core.listening_socket import open_listening_socket
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from tests.support.factory.command import factory
from tests.support.messages import refused


def test_a_released_address_can_be_used_again_at_once() -> None:
    first = open_listening_socket("127.0.0.1", 0)
    port = first.getsockname()[1]
    with refused("listening_socket.no_address", InputError, host="127.0.0.1", port=port, why="Address already in use"):
        open_listening_socket("127.0.0.1", port)
    first.close()
    open_listening_socket("127.0.0.1", port).close()
    with refused("listening_socket.no_address", InputError, host="203.0.113.7", why="Cannot assign requested address"):
        open_listening_socket("203.0.113.7", 0)  # an address for documentation: no machine has it


def test_the_ui_on_a_taken_port_is_refused_before_anything_starts(workspace: Workspace, ledger: Ledger) -> None:
    files = lambda: sorted(path.name for path in workspace.root.rglob("*") if "ledger.db" not in path.name)
    before = files()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = factory("ui", "--port", str(port), "--user", "ada", "-w", str(workspace.root))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and files() == before
    assert "error[listening_socket.no_address]" in done.stderr and f"127.0.0.1:{port}" in done.stderr
