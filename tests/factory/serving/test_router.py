"""The router passes on an engine's answers. A scripted server replaces the engine; all other parts are real."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from factory.release.published_link import MODEL_NAME
from factory.serving.champion import Champion
from factory.serving.engines import Engine, EngineKind
from factory.serving.router import ENDED, MOST_BYTES, MOST_TRIES, make_application
from factory.serving.supervisor import EngineSupervisor

PATH = "/v1/completions"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
STREAM = "text/event-stream; charset=utf-8"


def whole(status: int = 200, body: str = '{"choices": []}', kind: str = "application/json") -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {status} Said\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(f"{head}{body}".encode())

    return answer


def streamed(*chunks: str, then: asyncio.Event | None = None, cut: bool = False) -> Answer:
    """A streamed answer. Chunks after the first wait for ``then``; ``cut``: the connection closes before the end."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {STREAM}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for number, chunk in enumerate(chunks):
            if number == 1 and then:
                await then.wait()
            writer.write(f"{len(chunk):x}\r\n{chunk}\r\n".encode())
            await writer.drain()
        writer.write(b"" if cut else b"0\r\n\r\n")

    return answer


async def hangs_up(writer: asyncio.StreamWriter) -> None:
    """The connection closes before an answer begins."""


class Held(EngineSupervisor):
    """A supervisor with one engine, whose examinations have a given result."""

    def __init__(self) -> None:
        kind = EngineKind(
            "scripted", lambda export, socket: [], {}, 0.0, lambda path, body, export: path.encode() + body
        )
        super().__init__(kind, lambda: None, lambda line: None, Path())
        self.sound, self.examined = True, 0
        self._looked.set()

    async def is_usable(self, engine: Engine) -> bool:
        self.examined += 1
        return self.sound


class Scene:
    def __init__(self, supervisor: Held, engine: Engine, client: httpx.AsyncClient) -> None:
        self.supervisor, self.engine, self.client = supervisor, engine, client
        self.script: list[Answer] = []
        self.asked: list[tuple[str, bytes]] = []  # head and body of each request that the engine got

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line.split()[1]) for line in head.lower().splitlines() if "content-length" in line), 0)
        self.asked.append((head, await reader.readexactly(length)))
        await self.script.pop(0)(writer)
        writer.close()

    def counted(self, name: str) -> str:
        """The lines of one metric, joined."""
        text = self.supervisor.metrics.format_metrics_page([])
        return "; ".join(line.removeprefix(name) for line in text.splitlines() if line.startswith(name))


@asynccontextmanager
async def scene(key: str = "") -> AsyncIterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="router-") as name:
        folder, supervisor = Path(name), Held()
        process = await asyncio.create_subprocess_exec("sleep", "600")
        engine = Engine(supervisor.kind, Champion(7, folder / "export", "abc"), folder, folder / "log", process)
        supervisor.current, supervisor.engines = engine, [engine]
        supervisor.wanted = Champion(8, folder, "def")
        config = uvicorn.Config(
            make_application(supervisor, key), uds=str(folder / "router"), log_level="error", lifespan="off"
        )
        server = uvicorn.Server(config)
        serving = asyncio.ensure_future(server._serve())
        while not server.started:
            await asyncio.sleep(0.01)
        transport = httpx.AsyncHTTPTransport(uds=str(folder / "router"))
        async with httpx.AsyncClient(transport=transport, base_url="http://router", timeout=60) as client:
            made = Scene(supervisor, engine, client)
            async with await asyncio.start_unix_server(made.serve, folder / "socket"):
                yield made
        server.should_exit = True
        await serving
        process.kill()
        await engine.ended
        await engine.client.aclose()


def run(play: Callable[[Scene], Awaitable[Any]], key: str = "") -> None:
    async def main() -> None:
        async with scene(key) as made:
            await play(made)
            for _ in range(500):  # it is let go of a moment after the last byte was sent
                if not made.engine.in_flight:
                    break
                await asyncio.sleep(0.01)
            assert made.engine.in_flight == 0 and not made.script

    asyncio.run(main())


def test_the_router_passes_on_an_answer_unchanged() -> None:
    async def play(s: Scene) -> None:
        for status, kind in ((200, "application/json"), (418, "text/plain; charset=utf-8")):
            s.script = [whole(status, "said", kind)]
            answer = await s.client.post("/v1/chat/completions", content=b"{}")
            assert (answer.status_code, answer.text, answer.headers["content-type"]) == (status, "said", kind)
            assert answer.headers["x-factory-release"] == "7" and s.supervisor.examined == 0
        head, body = s.asked[0]
        assert head.startswith("POST /v1/chat/completions ") and body == b"/v1/chat/completions{}", (
            "as its kind adapts it"
        )
        assert "content-type: application/json\r\n" in head and "accept-encoding: identity\r\n" in head
        assert s.counted("factory_serve_requests_total") == '{status="200"} 1; {status="418"} 1'
        assert (
            s.counted("factory_serve_request_seconds_count") == " 2"
            and s.counted("factory_serve_retries_total") == " 0"
        )
        assert 0 < float(s.counted("factory_serve_request_seconds_sum")) < 60

    run(play)


ERROR = '{"error": {"code": "%s"}}'


@pytest.mark.parametrize(
    ("answer", "sound", "examined", "tries"),
    [
        (whole(500), True, 1, 1),  # what it was asked made it say so
        (whole(500), False, 2, 2),
        (whole(599, "no json"), False, 2, 2),
        (whole(500, '["not", "an object"]'), False, 2, 2),
        (whole(500, ERROR % "other"), False, 2, 2),
        (whole(500, ERROR % "not_finite"), False, 0, 1),  # of the weights: another engine would say the same
        (whole(499), False, 0, 1),
        (whole(400), False, 0, 1),
        (hangs_up, True, 1, 2),
    ],
)
def test_a_request_is_retried_if_its_engine_failed(answer: Answer, sound: bool, examined: int, tries: int) -> None:
    async def play(s: Scene) -> None:
        s.supervisor.sound = sound
        s.script = [answer, whole(201)][:tries]
        found = await s.client.post(PATH, content=b"{}")
        assert (found.status_code == 201) == (tries == 2) and len(s.asked) == tries
        assert s.supervisor.examined == examined and s.counted("factory_serve_retries_total") == f" {tries - 1}"

    run(play)


def test_a_request_whose_engines_all_fail_gets_an_error_after_five_tries() -> None:
    async def play(s: Scene) -> None:
        s.script = [hangs_up] * MOST_TRIES
        found = await s.client.post(PATH, content=b"{}")
        error = found.json()["error"]
        assert found.status_code == 502 and error["code"] == "engine_failed" and "5 engines" in error["message"]
        assert len(s.asked) == MOST_TRIES == 5 and s.counted("factory_serve_retries_total") == " 4"

    run(play)


def test_a_stream_reaches_the_client_while_it_is_written() -> None:
    async def play(s: Scene) -> None:
        then = asyncio.Event()
        s.script = [streamed("data: 1\n\n", "data: 2\n\n", "data: 3\n\n", then=then)]
        async with s.client.stream("POST", PATH, content=b"{}") as answer:
            chunks = answer.aiter_text()
            assert await anext(chunks) == "data: 1\n\n" and s.engine.in_flight == 1
            assert answer.headers["content-type"] == STREAM and answer.headers["x-factory-release"] == "7"
            then.set()
            assert "".join([chunk async for chunk in chunks]) == "data: 2\n\ndata: 3\n\n"
        s.script = [streamed()]
        assert (await s.client.post(PATH, content=b"{}")).text == ""
        assert s.supervisor.examined == 0 and s.counted("factory_serve_broken_streams_total") == " 0"

    run(play)


def test_a_broken_stream_ends_with_an_error_and_is_not_retried() -> None:
    async def play(s: Scene) -> None:
        s.script = [streamed("data: 1\n\n", "data: 2\n\n", cut=True)]
        answer = await s.client.post(PATH, content=b"{}")
        first, second, last, end = answer.text.split("\n\n")
        assert (first, second, end) == ("data: 1", "data: 2", "") and answer.status_code == 200
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "engine_failed" and error["message"] == ENDED and error["type"] == "server_error"
        assert s.supervisor.examined == 1 and s.counted("factory_serve_broken_streams_total") == " 1"

    run(play)


@pytest.mark.parametrize("key", ["sesame", "sésame€"])
def test_a_request_without_the_key_can_read_only_the_health_page(key: str) -> None:
    """A key that is not ASCII is compared as UTF-8 bytes."""

    async def play(s: Scene) -> None:
        refused = [given.encode() for given in ("", "Bearer", f"Bearer {key[:-1]}", key, f"Bearer {key}x")]
        if not key.isascii():
            refused += [f"Bearer {key}".encode(coding) for coding in ("cp1252", "iso8859-15")]
        for headers in ({}, *({"Authorization": given} for given in refused)):
            for method, path in (("POST", PATH), ("GET", "/v1/models"), ("GET", "/metrics"), ("PUT", "/else")):
                answer = await s.client.request(method, path, headers=headers)
                error = answer.json()["error"]
                assert (answer.status_code, error["code"], error["type"]) == (
                    401,
                    "invalid_api_key",
                    "authentication_error",
                )
        assert (await s.client.get("/health")).status_code == 200 and not s.asked
        s.script = [whole()]
        assert (await s.client.post(PATH, headers={"Authorization": f"Bearer {key}".encode()})).status_code == 200

    run(play, key=key)


def test_a_request_that_is_too_large_is_refused() -> None:
    async def play(s: Scene) -> None:
        s.script = [whole()]
        assert (await s.client.post(PATH, content=bytes(MOST_BYTES))).status_code == 200
        answer = await s.client.post(PATH, content=bytes(MOST_BYTES + 1))
        assert answer.status_code == 413 and "16 MiB" in answer.text and len(s.asked) == 1

    run(play)


def test_health_models_and_metrics_pages_describe_the_server() -> None:
    async def play(s: Scene) -> None:
        assert (await s.client.get("/health")).json() == {"ok": True, "release": 7, "champion": 8, "problem": None}
        assert (await s.client.get("/v1/models")).json() == {
            "object": "list",
            "data": [
                {
                    "id": MODEL_NAME,
                    "object": "model",
                    "created": 0,
                    "owned_by": "factory",
                    "release": 7,
                    "export_sha256": "abc",
                }
            ],
        }
        s.script = [whole(200, "engine_tokens 5\n")]
        page = await s.client.get("/metrics")
        assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = page.text.splitlines()
        for line in ("factory_serve_release 7", "factory_serve_champion 8", "factory_serve_export_changed 0"):
            assert line in lines
        assert lines[-1] == "engine_tokens 5" and 'factory_serve_in_flight{release="7"} 0' in lines
        s.script = [hangs_up]
        assert "metrics missing: RemoteProtocolError" in (await s.client.get("/metrics")).text
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
            answer = await s.client.request(method, "/v1/else")
            error = answer.json()["error"]
            assert answer.status_code == 404 and error["code"] == "serving.no_such_address"
            assert error["message"].startswith(f"{method} /v1/else ") and "/v1/chat/completions" in error["message"]
        s.supervisor.current = s.supervisor.wanted = None
        s.supervisor.trouble = "its export is gone"
        health = await s.client.get("/health")
        assert health.status_code == 503
        assert health.json() == {"ok": False, "release": None, "champion": None, "problem": "its export is gone"}
        assert (await s.client.get("/v1/models")).json()["data"] == []
        page = (await s.client.get("/metrics")).text.splitlines()
        assert "factory_serve_release 0" in page and "factory_serve_champion 0" in page
        answer = await s.client.post(PATH, content=b"{}")
        error = answer.json()["error"]
        assert (answer.status_code, answer.headers["retry-after"], error["code"]) == (503, "5", "no_engine")
        assert error["message"] == "its export is gone"

    run(play)
