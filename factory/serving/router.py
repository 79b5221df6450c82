"""Answers at the address for users: checks the key, passes requests to the current engine, and counts. The engine's answers are not changed.

If an engine ends before the first byte of an answer was sent, the router sends the request to the next engine. A stream that has begun then
ends with an error event.
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

from factory.release.published_link import MODEL_NAME
from factory.serving.api.disconnects import ClientDisconnectedError, cancel_if_client_disconnects
from factory.serving.api.errors import ApiError
from factory.serving.engines import Engine
from factory.serving.supervisor import EngineSupervisor, NoEngineServesError
from kernels.contract.message import Message

PATHS = ("/v1/chat/completions", "/v1/completions")
MOST_BYTES = 16 << 20  # the largest request
MOST_TRIES = 5  # tries for one request; limited, because the request itself may make engines fail
ENDED = Message("serving.engine_ended_in_answer", "The engine ended while it answered. Send the request again.")


def make_application(supervisor: EngineSupervisor, key: str) -> Starlette:
    """Return the router as an ASGI application. ``key``: the bearer token that each request needs; '' if it needs none."""
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
    def __init__(self, supervisor: EngineSupervisor, key: str) -> None:
        self.supervisor, self.metrics = supervisor, supervisor.metrics
        self._key = key.encode(errors="surrogateescape")  # the bytes as given on the command line or in the environment

    def guarded(self, handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Wrap ``handle``: requests without the key are refused, and errors become answers."""

        async def answer(request: Request) -> Response:
            try:
                given = request.headers.get("authorization", "").encode("latin-1")  # the bytes as sent
                if self._key and not hmac.compare_digest(given, b"Bearer " + self._key):
                    wrong = Message(
                        "serving.wrong_key", "Send the server's key in the header 'Authorization: Bearer KEY'."
                    )
                    raise ApiError(401, wrong, openai_code="invalid_api_key")
                response = await handle(request)
            except ApiError as error:
                response = JSONResponse(error.make_body(), error.status)
            except NoEngineServesError as error:
                body = ApiError(503, Message.from_json(error.message), openai_code="no_engine").make_body()
                response = JSONResponse(body, 503, {"Retry-After": "5"})
            except (ClientDisconnectedError, ClientDisconnect):
                response = Response(status_code=499)
            self.metrics.add_to_counter("factory_serve_requests_total", status=response.status_code)
            return response

        return answer

    async def generate(self, request: Request) -> Response:
        began = time.monotonic()
        body = await _read_body(request)
        path, tried = request.url.path, 0
        while True:
            async with AsyncExitStack() as held:
                engine = await cancel_if_client_disconnects(
                    request, held.enter_async_context(self.supervisor.acquire_engine())
                )
                adapted = engine.kind.adapt(path, body, engine.champion.export)
                try:
                    answer = await cancel_if_client_disconnects(request, self._ask(engine, path, adapted, held))
                    if answer is not None:
                        return self._passed_on(answer, engine, began, held.pop_all())
                except httpx.TransportError:
                    pass
                await self.supervisor.is_usable(engine)
                tried += 1
            if tried == MOST_TRIES:
                failed = Message(
                    "serving.engines_ended",
                    "{tried} engines ended while they answered this request. The request may be the cause.",
                    tried=tried,
                )
                raise ApiError(502, failed, openai_code="engine_failed")
            self.metrics.add_to_counter("factory_serve_retries_total")

    async def _ask(self, engine: Engine, path: str, body: bytes, held: AsyncExitStack) -> _Answer | None:
        """Return the answer, complete or up to its first bytes; None if the engine failed and another should be asked."""
        headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
        }  # the body's bytes are passed on unchanged
        response = await engine.send_request("POST", path, content=body, headers=headers)
        held.push_async_callback(response.aclose)
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            chunks = response.aiter_raw()
            return _Answer(response, await anext(chunks, b""), chunks)
        content = await response.aread()
        if (
            response.status_code >= 500
            and _code_of(content) != "not_finite"
            and not await self.supervisor.is_usable(engine)
        ):
            return None
        return _Answer(response, content, None)

    def _passed_on(self, answer: _Answer, engine: Engine, began: float, held: AsyncExitStack) -> Response:
        """Return the engine's answer as a response, which releases ``held`` when its last byte was sent or sending fails."""
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
                self.metrics.add_to_counter("factory_serve_broken_streams_total")
                await self.supervisor.is_usable(engine)
                yield f"data: {json.dumps(ApiError(502, ENDED, openai_code='engine_failed').make_body())}\n\n".encode()
        self.metrics.add_to_counter("factory_serve_request_seconds_sum", time.monotonic() - began)
        self.metrics.add_to_counter("factory_serve_request_seconds_count")

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
            facts | {"problem": supervisor.trouble or supervisor.export_problem or None}, 200 if engine else 503
        )

    async def metrics_page(self, request: Request) -> Response:
        supervisor = self.supervisor
        engine, wanted = supervisor.current, supervisor.wanted
        gauges: list[tuple[str, dict[str, object], float]] = [
            ("factory_serve_release", {}, engine.champion.release if engine else 0),
            ("factory_serve_champion", {}, wanted.release if wanted else 0),
            ("factory_serve_export_changed", {}, bool(supervisor.export_problem)),
        ]
        gauges += [
            ("factory_serve_in_flight", {"release": e.champion.release}, e.in_flight) for e in supervisor.engines
        ]
        text = self.metrics.format_metrics_page(gauges)
        if engine:
            try:
                text += (await (await engine.send_request("GET", "/metrics")).aread()).decode()
            except httpx.HTTPError as error:
                text += f"# engine metrics missing: {type(error).__name__}\n"
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def unknown(self, request: Request) -> Response:
        unknown = Message(
            "serving.no_such_address", "{method} {path} is not an address of this server. Known addresses: {known}.", method=request.method,
            path=request.url.path[:80], known=[*PATHS, "/v1/models", "/health", "/metrics"],
        )  # fmt: skip
        raise ApiError(404, unknown)


class _Holding(StreamingResponse):
    """A streaming response that releases ``held`` when sending ends in any way, or if it never begins."""

    def __init__(self, held: AsyncExitStack, *content: Any, **options: Any) -> None:
        super().__init__(*content, **options)
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
            raise ApiError(
                413,
                Message("serving.request_too_large", "The request is larger than {most} MiB.", most=MOST_BYTES >> 20),
            )
    return bytes(body)


def _code_of(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""
