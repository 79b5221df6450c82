"""``factory serve``: runs the router and the supervisor in one event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from factory.core.errors import InputError
from factory.core.listening_socket import is_loopback, open_listening_socket
from factory.core.served_note import publish_served_address
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, record_event
from factory.ledger.rows import Subject
from factory.serving.champion import read_champion
from factory.serving.engines import EngineKind
from factory.serving.router import make_application
from factory.serving.supervisor import EngineSupervisor
from kernels.contract.message import Message

CLOSE_SECONDS = 5  # after an interrupt, requests in flight have this time to end


def serve_champion(
    workspace: Workspace, kind: EngineKind, *, host: str, port: int, key: str, say: Callable[[str], None]
) -> None:
    """Serve the champion until an interrupt. With ``port`` 0, a free port is chosen. ``say`` prints the address.

    Raises: InputError if the address is not available, or if other machines can reach it and ``key`` is empty.
    """
    if not key and not is_loopback(host):
        raise InputError(
            "serving.key_required",
            "Other machines can reach --host {host}, so a key is required. Set --key or $FACTORY_SERVE_KEY.",
            host=host,
        )
    listening = open_listening_socket(host, port)
    ledger = Ledger.open(workspace.ledger_url)

    def note(event: str, release: int, detail: dict[str, Any]) -> None:
        with ledger.begin() as tx:
            record_event(tx, event, Subject("release", release), detail)

    supervisor = EngineSupervisor(kind, lambda: read_champion(workspace), say, workspace.logs, note)
    where = f"[{host}]" if ":" in host else host
    url = f"http://{where}:{listening.getsockname()[1]}/v1"
    say(Message("serving.open", "The server listens at {url} (Ctrl-C stops the server)", url=url))
    with publish_served_address(workspace, url):
        asyncio.run(_run(supervisor, listening, key))


async def _run(supervisor: EngineSupervisor, listening: socket.socket, key: str) -> None:
    options = uvicorn.Config(
        make_application(supervisor, key),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    looking = asyncio.ensure_future(supervisor.run())
    server = uvicorn.Server(options)
    looking.add_done_callback(lambda _: setattr(server, "should_exit", True))  # only a bug ends the supervisor
    try:
        await server.serve(sockets=[listening])
    finally:
        looking.cancel()
        ended = (await asyncio.gather(looking, return_exceptions=True))[0]
        await supervisor.close()
    if isinstance(ended, Exception):
        raise ended
