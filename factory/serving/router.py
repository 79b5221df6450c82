"""The address that users have: key, engine of the moment, retries, metrics. The answers are the engine's own bytes.

A request whose engine ends before a byte of its answer was sent is asked again of the next engine; a stream that has begun ends with an error
event, as nobody can take back what was read.
"""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from factory.release.serving import MODEL_NAME
from factory.serving.api.disconnects import Gone, unless_gone
from factory.serving.api.errors import ApiError
from factory.serving.engines import Engine
from factory.serving.swap import Supervisor, Unavailable

PATHS = ("/v1/chat/completions", "/v1/completions")
MOST_BYTES = 16 << 20  # of a request
MOST_TRIES = 5  # of one request: it may be what ends the engines
ENDED = "the engine ended while it answered; ask again"


def application(supervisor: Supervisor, key: str) -> Starlette:
    """``key``: what a request must bring as its bearer token; empty: nothing."""
    router = _Router(supervisor, key)
    routes = [Route(path, router.guarded(router.generate), methods=["POST"]) for path in PATHS]
    routes += [
        Route("/v1/models", router.guarded(router.models)),
        Route("/metrics", router.guarded(router.metrics_page)),
        Route("/health", router.health),
        Route("/{path:path}", router.guarded(router.unknown), methods=["GET", "POST", "PUT", "DELETE", "PATCH"]),
    ]
    return Starlette(routes=routes)


class _Router:
    def __init__(self, supervisor: Supervisor, key: str) -> None:
        self.supervisor, self.metrics = supervisor, supervisor.metrics
        self._key = key.encode(errors="surrogateescape")  # of the command line or the environment: its bytes

    def guarded(self, handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """``handle``, for who has the key; what it raises becomes an answer."""

        async def answer(request: Request) -> Response:
            try:
                given = request.headers.get("authorization", "").encode("latin-1")  # the bytes that were sent
                if self._key and not hmac.compare_digest(given, b"Bearer " + self._key):
                    raise ApiError(401, "this server wants its key: Authorization: Bearer KEY", code="invalid_api_key")
                response = await handle(request)
            except ApiError as error:
                response = JSONResponse(error.body(), error.status)
            except Unavailable as error:
                body = ApiError(503, str(error), code="no_engine").body()
                response = JSONResponse(body, 503, {"Retry-After": "5"})
            except (Gone, ClientDisconnect):
                response = Response(status_code=499)
            self.metrics.add("factory_serve_requests_total", status=response.status_code)
            return response

        return answer

    async def generate(self, request: Request) -> Response:
        began = time.monotonic()
        body = await _read_body(request)
        path, tried = request.url.path, 0
        while True:
            async with AsyncExitStack() as held:
                engine = await unless_gone(request, held.enter_async_context(self.supervisor.use()))
                adapted = engine.kind.adapt(path, body, engine.champion.export)
                try:
                    answer = await unless_gone(request, self._ask(engine, path, adapted, held))
                    if answer is not None:
                        return self._passed_on(answer, engine, began, held.pop_all())
                except httpx.TransportError:
                    pass
                await self.supervisor.examine(engine)
                tried += 1
            if tried == MOST_TRIES:
                raise ApiError(
                    502, f"{ENDED}, but this one saw {tried} engines end, and may be the cause", code="engine_failed"
                )
            self.metrics.add("factory_serve_retries_total")

    async def _ask(self, engine: Engine, path: str, body: bytes, held: AsyncExitStack) -> _Answer | None:
        """The answer, whole or to its first byte; None when the engine is of no use and another should be asked."""
        headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
        }  # the bytes are passed on as they are
        response = await engine.ask("POST", path, content=body, headers=headers)
        held.push_async_callback(response.aclose)
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            chunks = response.aiter_raw()
            return _Answer(response, await anext(chunks, b""), chunks)
        content = await response.aread()
        if (
            response.status_code >= 500
            and _code_of(content) != "not_finite"
            and not await self.supervisor.examine(engine)
        ):
            return None
        return _Answer(response, content, None)

    def _passed_on(self, answer: _Answer, engine: Engine, began: float, held: AsyncExitStack) -> Response:
        """The engine's answer as ours; ``held`` is let go once its last byte is sent, or cannot be."""
        headers = {"x-factory-release": str(engine.champion.release)}
        kind = answer.response.headers.get("content-type", "application/json")
        bodies = self._bytes_of(answer, engine, began)
        return _Holding(held, bodies, answer.response.status_code, headers, media_type=kind)

    async def _bytes_of(self, answer: _Answer, engine: Engine, began: float) -> AsyncIterator[bytes]:
        yield answer.first
        if answer.rest is not None:
            try:
                async for chunk in answer.rest:
                    yield chunk
            except httpx.TransportError:
                self.metrics.add("factory_serve_broken_streams_total")
                await self.supervisor.examine(engine)
                yield f"data: {json.dumps(ApiError(502, ENDED, code='engine_failed').body())}\n\n".encode()
        self.metrics.add("factory_serve_request_seconds_sum", time.monotonic() - began)
        self.metrics.add("factory_serve_request_seconds_count")

    async def models(self, request: Request) -> Response:
        engine = self.supervisor.current
        found = []
        if engine:
            champion = engine.champion
            found = [{"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "factory", "release": champion.release,
                      "export_sha256": champion.export_sha256}]  # fmt: skip
        return JSONResponse({"object": "list", "data": found})

    async def health(self, request: Request) -> Response:
        supervisor = self.supervisor
        engine = supervisor.current
        wanted = supervisor.wanted.release if supervisor.wanted else None
        facts = {"ok": engine is not None, "release": engine and engine.champion.release, "champion": wanted}
        return JSONResponse(
            facts | {"problem": supervisor.trouble or supervisor.changed_export or None}, 200 if engine else 503
        )

    async def metrics_page(self, request: Request) -> Response:
        supervisor = self.supervisor
        engine, wanted = supervisor.current, supervisor.wanted
        gauges: list[tuple[str, dict[str, object], float]] = [
            ("factory_serve_release", {}, engine.champion.release if engine else 0),
            ("factory_serve_champion", {}, wanted.release if wanted else 0),
            ("factory_serve_export_changed", {}, bool(supervisor.changed_export)),
        ]
        gauges += [
            ("factory_serve_in_flight", {"release": e.champion.release}, e.in_flight) for e in supervisor.engines
        ]
        text = self.metrics.text(gauges)
        if engine:
            try:
                text += (await (await engine.ask("GET", "/metrics")).aread()).decode()
            except httpx.HTTPError as error:
                text += f"# the engine's own metrics could not be read: {type(error).__name__}\n"
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def unknown(self, request: Request) -> Response:
        known = ", ".join([*PATHS, "/v1/models", "/health", "/metrics"])
        raise ApiError(404, f"{request.method} {request.url.path[:80]}: there is no such address; known: {known}")


class _Holding(StreamingResponse):
    """Lets go of what it holds however its sending ends, also when it never begins."""

    def __init__(self, held: AsyncExitStack, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


class _Answer(NamedTuple):
    response: httpx.Response
    first: bytes
    rest: AsyncIterator[bytes] | None


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise ApiError(413, f"the request has more than {MOST_BYTES >> 20} MiB")
    return bytes(body)


def _code_of(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""
