"""``factory serve`` as a process: refused options, kills, and its end by a signal."""

from __future__ import annotations

import signal
import socket

import httpx
import pytest

from agents.llm.exchange import Request
from factory.code_loop.agent_runs import AgentOptions, AgentRuns
from factory.core.errors import InputError
from factory.core.served_note import find_served_champion
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.release.published_link import MODEL_NAME
from tests.support.factory.command import factory
from tests.support.messages import refused
from tests.support.said import Said
from tests.support.serving.serve_process import PATIENCE, gone, served
from tests.support.serving.served import PROMPT, add_release, continuation, make_export, roll_back


@pytest.mark.slow("three engines come up")
def test_a_killed_router_leaves_no_process_and_serves_the_champion_after_a_restart(
    workspace: Workspace, ledger: Ledger
) -> None:
    exports = [make_export(workspace.exports / str(seed), seed) for seed in (1, 2)]
    for export in exports:
        add_release(workspace, ledger, export)
    with served(workspace) as first:
        first.until("elease 2 is served")
        answer = first.ask()
        assert answer.json()["choices"][0]["text"] == continuation(exports[1], PROMPT, 20)
        engines = first.children()
        assert engines
        first.inner.send_signal(signal.SIGKILL)
        assert gone(engines)
    roll_back(ledger, 1)
    with refused("served_note.no_answer", InputError):
        find_served_champion(workspace, "")  # its note outlived it
    with served(workspace) as second:
        second.until("elease 1 is served")
        assert find_served_champion(workspace, "") == (second.address, MODEL_NAME, 1)
        runs = AgentRuns.open(Plant(workspace, ledger, Said()), "kernel-engineer", AgentOptions("champion"))
        assert runs.endpoint.name == "champion, release 1"
        asked = Request("hello", runs.policy.model, ({"role": "user", "content": "hi"},), reply_tokens=8)
        assert runs.endpoint.send(asked).usage
        assert second.ask().headers["x-factory-release"] == "1"
        engines = second.children()
        second.inner.send_signal(signal.SIGINT)
        assert second.inner.wait(PATIENCE) == 130 and gone(engines)


@pytest.mark.long("an engine comes up")
def test_a_router_killed_during_a_swap_leaves_no_process(workspace: Workspace, ledger: Ledger) -> None:
    for seed in (1, 2):
        export = make_export(workspace.exports / str(seed), seed)
        if seed == 1:
            add_release(workspace, ledger, export)
    with served(workspace) as first:
        first.until("elease 1 is served")
        add_release(workspace, ledger, workspace.exports / "2")
        first.until("release 2 starts")
        engines = first.children()
        assert len(engines) >= 2
        first.inner.send_signal(signal.SIGKILL)
        assert gone(engines)
    with served(workspace) as second:
        second.until("elease 2 is served")


def test_the_server_waits_for_the_first_release(workspace: Workspace, ledger: Ledger) -> None:
    with served(workspace) as process:
        answer = process.ask()
        error = answer.json()["error"]
        assert answer.status_code == 503 and error["code"] == "no_engine" and "'factory status'" in error["message"]
        assert httpx.get(process.address.replace("/v1", "/health")).json()["ok"] is False
        with refused("served_note.no_release", InputError):
            find_served_champion(workspace, "")
        process.inner.send_signal(signal.SIGTERM)
        assert process.inner.wait(PATIENCE) == 143
    with refused("served_note.no_server", InputError):
        find_served_champion(workspace, "")


def test_serve_refuses_impossible_options_at_once(workspace: Workspace, ledger: Ledger) -> None:
    words = ["serve", "--workspace", str(workspace.root)]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = factory(*words, "--port", port)
        assert (
            done.returncode == 2
            and "error[listening_socket.no_address]" in done.stderr
            and f"127.0.0.1:{port}" in done.stderr
        )
    open_to_all = factory(*words, "--host", "0.0.0.0", "--port", "0")
    assert open_to_all.returncode == 2 and "error[serving.key_required]" in open_to_all.stderr
    unknown = factory(*words, "--engine", "vlm")
    assert unknown.returncode == 2 and "did you mean 'vllm'" in unknown.stderr
