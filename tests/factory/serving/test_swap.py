"""During a swap under load no request fails, whichever process is killed at whichever stage."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, events
from factory.serving import engines, supervisor
from factory.serving.champion import read_champion
from factory.serving.engines import Engine, make_native_engine_kind
from tests.support.messages import codes
from tests.support.serving.kills import OLD, kill_in_swap
from tests.support.serving.load import AT_ONCE, Load
from tests.support.serving.served import PROMPT, Serving, add_release, continuation, make_export, roll_back, serving


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [make_export(tmp_path_factory.mktemp("exports") / str(seed), seed) for seed in (1, 2)]


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start real processes as engines, because SIGSTOP would stop only the stand-in of a fork."""
    monkeypatch.setattr(engines, "asyncio", asyncio)


def noted(ledger: Ledger) -> list[str]:
    found = ledger.select_rows(sa.select(events.c.kind, events.c.subject).order_by(events.c.id))
    return [f"{row['kind']} {row['subject']}" for row in found if row["kind"].startswith("serving")]


def run(scene: Callable[[], Awaitable[Any]]) -> None:
    asyncio.run(scene())  # type: ignore[arg-type]


@pytest.mark.slow("three engines come up under load")
def test_a_release_and_a_rollback_lose_no_request(workspace: Workspace, ledger: Ledger, exports: list[Path]) -> None:
    add_release(workspace, ledger, exports[0])
    asking: list[Load] = []

    async def hurry(now: str, engine: Engine) -> None:
        if now == "warm" and asking:  # all clients ask when the flip comes
            asking[0].hurry()
            await asking[0].more(AT_ONCE)

    async def scene() -> None:
        async with serving(workspace, ledger, on_stage=hurry) as served:
            await served.until(1)
            async with Load(served.client, exports) as load:
                asking.append(load)
                await load.more(AT_ONCE)
                assert set(load.answers) == {1}
                load.calm()
                add_release(workspace, ledger, exports[1])
                await served.until(2)
                before = len(load.answers)
                await load.more(2 * AT_ONCE)  # the first of them may have begun before
                assert set(load.answers[before + AT_ONCE :]) == {2}
                load.calm()
                roll_back(ledger, 1)
                await served.until(1)
                await load.more(2 * AT_ONCE)
                assert load.answers[-1] == 1
            assert load.failures == [] and load.cut == 0
            metrics = (await served.client.get("/metrics")).text
            assert 'factory_serve_swaps_total{release="1"} 2' in metrics and "factory_serve_release 1" in metrics
            assert f'factory_serve_requests_total{{status="200"}} {len(load.answers)}' in metrics
            assert "factory_engine_tokens_total" in metrics

    run(scene)
    assert noted(ledger) == ["serving release:1", "serving release:2", "serving release:1"]


@pytest.mark.sample("parity")
@pytest.mark.slow("five engines come up for each stage")
@pytest.mark.parametrize("stage", ["started", "healthy", "verified", "parity", "warm"])
def test_a_new_engine_that_dies_at_any_stage_changes_nothing(
    workspace: Workspace, ledger: Ledger, exports: list[Path], stage: str
) -> None:
    add_release(workspace, ledger, exports[0])
    killed: list[int] = []

    async def kill(now: str, engine: Engine) -> None:
        if now == stage and engine.champion.release == 2 and not killed:
            killed.append(engine.process.pid)
            os.kill(engine.process.pid, signal.SIGKILL)

    async def scene() -> None:
        async with serving(workspace, ledger, on_stage=kill) as served:
            await served.until(1)
            async with Load(served.client, exports) as load:
                load.calm()
                add_release(workspace, ledger, exports[1])
                await served.until_said("elease 2 is not served")
                assert served.supervisor.current and served.supervisor.current.champion.release == 1
                load.hurry()
                await load.more(AT_ONCE)
                load.calm()
                await served.until(2)
                load.hurry()
                await load.more(2 * AT_ONCE)
                assert load.answers[-1] == 2
            assert load.failures == [] and load.cut == 0
            assert any("was ended by signal 9" in line and "elease 1 is still served" in line for line in served.said)

    run(scene)
    assert len(killed) == 1
    assert noted(ledger) == ["serving release:1", "serving_failed release:2", "serving release:2"]


@pytest.mark.sample("warm")
@pytest.mark.slow("four engines come up under load for each stage")
@pytest.mark.parametrize("stage", ["started", "warm"])
def test_an_old_engine_that_dies_while_the_new_one_starts_fails_only_begun_streams(
    workspace: Workspace, ledger: Ledger, exports: list[Path], stage: str
) -> None:
    found = asyncio.run(kill_in_swap(workspace, ledger, exports, OLD, stage, calm=True))
    assert found.failures == [] and found.cut <= AT_ONCE // 2
    first, *between, last = noted(ledger)
    assert (first, last) == ("serving release:1", "serving release:2")
    assert set(between) <= {"serving_failed release:1", first}, "killed just before the flip, its end needs no note"


@pytest.mark.slow("three engines come up")
@pytest.mark.usefixtures("anew")
def test_an_old_engine_that_dies_while_it_drains_fails_only_begun_streams(
    workspace: Workspace, ledger: Ledger, exports: list[Path]
) -> None:
    add_release(workspace, ledger, exports[0])

    hung: list[int] = []  # requests that the old engine works on when it is killed
    asking: list[Load] = []

    async def scene() -> None:
        async def kill(now: str, engine: Engine) -> None:
            if now not in ("warm", "flipped") or engine.champion.release == 1:
                return
            (old,) = (e for e in served.supervisor.engines if e.champion.release == 1)
            if now == "warm":  # stopped, it answers nobody: almost all clients are asking it when the flip comes
                asking[0].hurry()
                await asking[0].more(AT_ONCE)
                os.kill(old.process.pid, signal.SIGSTOP)
                while old.in_flight < AT_ONCE:  # what it wrote before is still read: one that has its answer asks again
                    await asyncio.sleep(0.02)
            else:
                hung.append(old.in_flight)
                os.kill(old.process.pid, signal.SIGKILL)

        async with serving(workspace, ledger, on_stage=kill) as served:
            await served.until(1)
            async with Load(served.client, exports) as load:
                await load.more(AT_ONCE)
                asking.append(load)
                load.calm()
                add_release(workspace, ledger, exports[1])
                await served.until(2)
                await load.more(2 * AT_ONCE)
            assert load.failures == [] and load.cut <= AT_ONCE // 2
            metrics = (await served.client.get("/metrics")).text
            assert f"factory_serve_broken_streams_total {load.cut}" in metrics
            retries = next(line for line in metrics.splitlines() if line.startswith("factory_serve_retries_total"))
            assert hung[0] > AT_ONCE // 2 and float(retries.split()[1]) >= hung[0] - load.cut, "each that had not begun"

    run(scene)


@pytest.mark.slow("two engines come up under load")
def test_an_engine_that_dies_is_replaced_and_its_requests_are_retried(
    workspace: Workspace, ledger: Ledger, exports: list[Path]
) -> None:
    add_release(workspace, ledger, exports[0])

    async def scene() -> None:
        async with serving(workspace, ledger) as served:
            await served.until(1)
            async with Load(served.client, exports) as load:
                await load.more(AT_ONCE)
                assert served.supervisor.current
                os.kill(served.supervisor.current.process.pid, signal.SIGKILL)
                await load.more(2 * AT_ONCE)
            assert load.failures == [] and load.cut <= AT_ONCE // 2
            assert any("was ended by signal 9" in line for line in served.said)
            assert "factory_serve_engine_ends_total 1" in (await served.client.get("/metrics")).text

    run(scene)
    assert noted(ledger) == ["serving release:1", "serving_failed release:1", "serving release:1"]


@pytest.mark.long("two engines come up")
@pytest.mark.usefixtures("anew")
def test_an_engine_that_hangs_is_replaced(
    workspace: Workspace, ledger: Ledger, exports: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_release(workspace, ledger, exports[0])

    async def scene() -> None:
        async with serving(workspace, ledger) as served:
            await served.until(1)
            assert served.supervisor.current
            first = served.supervisor.current.process.pid
            await asyncio.sleep(3)  # some answers, to know how long they take
            monkeypatch.setattr(
                supervisor, "NO_ANSWER_SECONDS", 0.0
            )  # from now on 5 times the slowest of them, and no minute
            monkeypatch.setattr(supervisor, "NO_ANSWER", 5)
            os.kill(first, signal.SIGSTOP)
            answer = await served.client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4})
            assert answer.status_code == 200 and served.supervisor.current.process.pid != first
            assert any("did not answer" in line for line in served.said)

    run(scene)


@pytest.mark.long("four engines come up")
def test_an_engine_that_ends_repeatedly_is_restarted_after_pauses(
    workspace: Workspace, ledger: Ledger, exports: list[Path]
) -> None:
    add_release(workspace, ledger, exports[0])
    killed: list[int] = []

    async def kill(now: str, engine: Engine) -> None:
        if now == "flipped" and len(killed) < 3:
            killed.append(engine.process.pid)
            os.kill(engine.process.pid, signal.SIGKILL)

    async def scene() -> None:
        async with serving(workspace, ledger, on_stage=kill) as served:
            await served.until_said(" in 2 s")
            await served.until(1)
            assert (await served.client.post("/v1/completions", json={"prompt": PROMPT})).status_code == 200

    run(scene)
    assert len(set(killed)) == 3 and noted(ledger).count("serving_failed release:1") == 3


@pytest.mark.slow("an engine comes up; what it works on is counted until nothing is left")
def test_a_client_that_disconnects_does_not_keep_an_engine_busy(
    workspace: Workspace, ledger: Ledger, exports: list[Path]
) -> None:
    add_release(workspace, ledger, exports[0])

    async def hang_up(served: Serving, number: int) -> None:
        """Close the connection: before the answer, at its first byte, or in its midst."""
        reader, writer = await asyncio.open_connection(served.client.base_url.host, served.client.base_url.port)
        body = json.dumps({"prompt": PROMPT, "max_tokens": 200, "stream": bool(number % 2), "n": 4})
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        if number % 3:
            await writer.drain()
        if number % 2 and number % 3 == 2:
            await reader.read(1)
        writer.close()

    async def scene() -> None:
        async with serving(workspace, ledger) as served:
            await served.until(1)
            engine = served.supervisor.current
            assert engine
            await asyncio.gather(*(hang_up(served, number) for number in range(60)))
            while True:  # its answers are 200 tokens at most: this ends, or the test hangs
                counts = (await engine.client.get("/health")).json()
                if engine.in_flight == counts["running"] == counts["waiting"] == 0:
                    break
                await asyncio.sleep(0.1)
            assert counts["tokens_total"] < 60 * 4 * 200
            answer = await served.client.post("/v1/completions", json={"prompt": PROMPT})
            assert answer.status_code == 200

    run(scene)


@pytest.mark.slow("an engine comes up")
def test_changed_files_of_a_served_export_are_reported_and_change_no_answer(
    workspace: Workspace, ledger: Ledger, tmp_path: Path
) -> None:
    export = make_export(tmp_path / "export", 1)
    add_release(workspace, ledger, export)
    weights = export / "model.safetensors"
    whole = weights.read_bytes()

    async def scene() -> None:
        async with serving(workspace, ledger) as served:
            await served.until(1)
            assert served.supervisor.current
            engine = served.supervisor.current.process.pid
            with open(weights, "r+b") as file:  # in place: who has mapped the file sees it
                file.seek(len(whole) // 2)
                file.write(bytes(len(whole) - len(whole) // 2))
            await served.until_said("continues to serve release 1 from memory")
            health = (await served.client.get("/health")).json()
            assert health["ok"] and "differs from the released export" in health["problem"]
            assert "factory_serve_export_changed 1" in (await served.client.get("/metrics")).text
            answer = await served.client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 20})
            weights.write_bytes(whole)
            assert answer.json()["choices"][0]["text"] == continuation(export, PROMPT, 20)
            while (await served.client.get("/health")).json()["problem"]:
                await asyncio.sleep(0.1)
            assert engine == served.supervisor.current.process.pid

    run(scene)


@pytest.mark.slow("two engines come up, failures are tried again after a pause")
def test_an_export_that_was_not_judged_is_not_served(
    workspace: Workspace, ledger: Ledger, exports: list[Path], tmp_path: Path
) -> None:
    add_release(workspace, ledger, exports[0])
    touched = make_export(tmp_path / "touched", 2)

    async def scene() -> None:
        async with serving(workspace, ledger) as served:
            await served.until(1)
            add_release(workspace, ledger, touched)
            (touched / "README.md").write_text("hello")
            await served.until_said("differs from the released export")
            health = (await served.client.get("/health")).json()
            assert (health["release"], health["champion"]) == (1, 2)
            assert "differs from the released export" in health["problem"]
            (touched / "README.md").unlink()  # put right: it is served without anybody's word
            await served.until(2)
            gone = make_export(tmp_path / "gone", 1)
            add_release(workspace, ledger, gone)
            gone.rename(tmp_path / "elsewhere")
            await served.until_said("elease 2 is still served")
            answer = await served.client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4})
            assert answer.headers["x-factory-release"] == "2"

    run(scene)


@pytest.mark.slow("two engines come up")
def test_a_replacement_engine_slower_than_a_swap_is_discarded(
    workspace: Workspace, ledger: Ledger, exports: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_release(workspace, ledger, exports[0])
    first = read_champion(workspace)
    add_release(workspace, ledger, exports[1])
    monkeypatch.setattr(supervisor, "POLL_SECONDS", 3600.0)  # no look, which would cancel the mend, comes between
    flips: list[int] = []
    swapped = asyncio.Event()

    async def order(now: str, engine: Engine) -> None:
        release = engine.champion.release
        if (now, release) == ("warm", 1):
            await swapped.wait()
        if now == "flipped":
            flips.append(release)
            swapped.set()
            while flips == [2] and any(e.champion.release == 1 for e in router_supervisor.engines):
                await asyncio.sleep(0.05)

    router_supervisor = supervisor.EngineSupervisor(
        make_native_engine_kind(), lambda: read_champion(workspace), print, workspace.logs, on_stage=order
    )
    router_supervisor.serving = first  # and its engine has ended

    async def scene() -> None:
        running = asyncio.ensure_future(router_supervisor.run())
        try:
            await swapped.wait()
            while router_supervisor.current is None or len(router_supervisor.engines) != 1:
                await asyncio.sleep(0.05)
            assert flips == [2] and router_supervisor.serving == router_supervisor.current.champion != first
            metrics = router_supervisor.metrics.format_metrics_page([])
            assert "factory_serve_failures_total 0" in metrics, "to be late is no failure"
            assert 'swaps_total{release="2"} 1' in metrics and 'swaps_total{release="1"}' not in metrics
        finally:
            running.cancel()
            await router_supervisor.close()

    run(scene)


def test_an_engine_with_other_weights_is_not_made_current(
    workspace: Workspace, ledger: Ledger, exports: list[Path]
) -> None:
    add_release(workspace, ledger, exports[0])
    swapped = replace(
        make_native_engine_kind(), command=lambda export, socket: make_native_engine_kind().command(exports[1], socket)
    )

    async def scene() -> None:
        async with serving(workspace, ledger, swapped) as served:
            await served.until_said("but the judge's")
            answer = await served.client.post("/v1/completions", json={"prompt": PROMPT})
            assert answer.status_code == 503 and "but the judge's" in answer.json()["error"]["message"]
            assert 'factory_serve_failures_total{stage="parity"}' in (await served.client.get("/metrics")).text

    run(scene)


def test_an_unexpected_error_is_reported_and_tried_again(
    workspace: Workspace, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_release(workspace, ledger, make_export(tmp_path / "export"))
    champion, said = read_champion(workspace), list[str]()

    async def start(*_: object) -> Engine:
        raise TypeError("no such engine")

    monkeypatch.setattr(supervisor.Engine, "start", start)
    assert champion is not None
    router_supervisor = supervisor.EngineSupervisor(
        make_native_engine_kind(), lambda: champion, said.append, workspace.logs
    )
    attempt = supervisor._Attempt(champion)
    asyncio.run(router_supervisor._attempt(attempt, mends=False))
    (message,) = said
    assert codes(said) == ["serving.tried_again"] and message.data["seconds"] == 1.0  # type: ignore[attr-defined]
    trouble = router_supervisor.trouble
    assert codes([trouble]) == ["serving.not_served"] and trouble.data["release"] == 1  # type: ignore[attr-defined]
    assert "TypeError: no such engine" in message
    assert attempt.failures == 1 and attempt.next_at > 0
