"""Releases and rollbacks beside a running ``factory serve``, with MLflow: by the commands and by the daemon, under load."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import httpx
import pytest

from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import champion
from factory.release.serving import served as published
from factory.show.mlflow.registry import CHAMPION, MODEL
from factory.show.mlflow.store import open_client
from tests.support.factory.command import factory
from tests.support.factory.shown import release
from tests.support.paths import ROOT
from tests.support.plants.release_scene import add_candidate, add_shard, add_verdict, with_store
from tests.support.serving.load import AT_ONCE, Load
from tests.support.serving.serve_process import Process, served
from tests.support.serving.served import make_export


def command(workspace: Workspace, *words: str) -> None:
    done = factory(*words, "--workspace", str(workspace.root))
    assert done.returncode == 0, done.stderr


def by_daemon(workspace: Workspace, number: int) -> None:
    """``factory run`` until the ledger's champion is that release."""
    words = [sys.executable, "-m", "factory", "run", "--workspace", str(workspace.root)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    daemon = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
    )
    assert daemon.stdout
    try:
        said = []
        for line in daemon.stdout:
            said.append(line)
            if f"release {number}: candidate {number} is champion" in line:
                break
        else:
            raise AssertionError(said)
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.communicate()


def where_it_stands(workspace: Workspace, ledger: Ledger, health: dict[str, object]) -> dict[str, object]:
    """The champion, as each place says it."""
    best, note = champion(ledger), published(workspace)
    version = open_client(workspace).get_model_version_by_alias(MODEL, CHAMPION)
    return {
        "ledger": best and best.number,
        "MLflow": int(version.tags["release"]),
        "exports/champion": note and note["release"],
        "server": health["release"],
        "server's wish": health["champion"],
    }


@pytest.mark.long("five engines come up under load, beside MLflow and a daemon")
def test_releases_and_rollbacks_beside_a_server_lose_no_request_and_all_agree(
    workspace: Workspace, ledger: Ledger
) -> None:
    with_store(workspace)
    add_shard(ledger)
    exports = [make_export(workspace.exports / str(seed), seed) for seed in (1, 2, 3)]
    for number, export in enumerate(exports, 1):
        assert add_candidate(workspace, ledger, export) == number
    release(Plant(workspace, ledger), add_verdict(ledger, 1))
    add_verdict(ledger, 2, against=1)

    def daemon() -> None:
        add_verdict(ledger, 3, against=2)
        by_daemon(workspace, 3)

    steps: list[tuple[int, Callable[[], None]]] = [
        (2, lambda: command(workspace, "release", "2")),
        (1, lambda: command(workspace, "release", "--rollback", "1")),
        (2, lambda: command(workspace, "releases", "rollback", "2")),
        (3, daemon),
    ]

    async def scene(process: Process) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        address = process.address.removesuffix("/v1")
        async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits) as client:
            async with Load(client, exports) as load:
                await load.more(AT_ONCE)
                for number, change in steps:
                    await asyncio.to_thread(change)
                    while (health := (await client.get("/health")).json())["release"] != number:
                        await asyncio.sleep(0.2)
                    await load.more(2 * AT_ONCE)
                    assert load.answers[-1] == number
                    found = where_it_stands(workspace, ledger, health)
                    assert set(found.values()) == {number}, found
            assert load.failures == [] and load.cut == 0
            metrics = (await client.get("/metrics")).text
            assert f'factory_serve_requests_total{{status="200"}} {len(load.answers)}' in metrics

    with served(workspace) as process:
        process.until("release 1 is served")
        asyncio.run(scene(process))
