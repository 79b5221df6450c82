"""Runs the embedded engine: ``python -m factory.serving.native.server EXPORT SOCKET`` answers requests of OpenAI's API on a Unix socket.

The process starts to listen when it has loaded the weights. It needs no key and no network, because requests come from the router.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from factory.core.errors import FactoryError
from factory.core.exports import hash_export_folder
from factory.evals.token_bytes import TokenBytes
from factory.release.published_link import MODEL_NAME
from factory.serving.api.disconnects import ClientDisconnectedError, cancel_if_client_disconnects
from factory.serving.api.errors import ApiError
from factory.serving.api.request import (
    CompletionRequest,
    load_served_model,
    parse_body,
    read_request,
    tokenize_chat,
    tokenize_prompts,
)
from factory.serving.native.batch import ComputedToken, DecodingBatch, DecodingJob
from factory.serving.native.decoder import CachedDecoder
from factory.serving.native.engine_loop import NOT_FINITE, EngineLoop
from factory.serving.native.replies import ChoiceReply, CompletionReply
from kernels.contract.message import Message

WrittenToken = tuple[ChoiceReply, str, ComputedToken]  # (choice, text that is final with this token, token)


class NativeEngine:
    """Reads and answers requests with a loaded export."""

    def __init__(self, export: Path, device: torch.device) -> None:
        """Raises: InputError for an export that cannot be served."""
        decoder = CachedDecoder.load(export, device)
        self._served = load_served_model(export)
        self._bytes = TokenBytes.load(export)
        self.release = hash_export_folder(export)[:16]
        self.loop = EngineLoop(DecodingBatch(decoder, _free_bytes(device) // decoder.cache_bytes_per_token))

    def read_request(self, body: bytes, chat: bool) -> CompletionRequest:
        """Return the content of a request's body. Raises: ApiError."""
        return read_request(parse_body(body), chat, self._served)

    def tokenize(self, body: bytes) -> list[int]:
        """Return the token ids of a prompt or of messages, as vLLM's /tokenize does. Raises: ApiError."""
        data = parse_body(body)
        if "messages" in data:
            return tokenize_chat(data, self._served.tokenizer)
        return list(tokenize_prompts(data, self._served)[0])

    def make_reply(self, request: CompletionRequest) -> CompletionReply:
        return CompletionReply(request, self._bytes, self.release)

    async def generate_tokens(self, request: CompletionRequest, reply: CompletionReply) -> AsyncIterator[WrittenToken]:
        """Yield each token of each choice as soon as it is computed. Raises: ApiError."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[int, ComputedToken | None]] = asyncio.Queue()
        keys = []
        seed = secrets.randbits(62) if request.seed is None else request.seed
        try:
            with self.loop.collect_submitted_jobs():
                for choice in reply.choices:
                    prompt = list(request.prompts[choice.index // request.n])

                    def listen(token: ComputedToken | None, number: int = choice.index) -> None:
                        loop.call_soon_threadsafe(queue.put_nowait, (number, token))

                    def make(key: int, prompt: list[int] = prompt, number: int = choice.index) -> DecodingJob:
                        own = (seed + number) % (1 << 63)
                        return DecodingJob(
                            key,
                            prompt,
                            request.most_tokens,
                            request.sampling,
                            request.stop_ids,
                            request.logprobs or 0,
                            own,
                        )

                    key = self.loop.submit_job(listen, make)
                    if key is None:
                        busy = Message("serving.too_many_requests", "The queue of requests is full. Try again later.")
                        raise ApiError(503, Message.from_json(self.loop.problem or busy), openai_code="overloaded")
                    keys.append(key)
            left = len(reply.choices)
            while left:
                number, token = await queue.get()
                choice = reply.choices[number]
                if (
                    token is None
                ):  # another request or the device caused the failure, so another engine may be able to answer
                    raise ApiError(503, Message.from_json(self.loop.problem), openai_code="engine_failed")
                if token.end == "failed":
                    raise ApiError(500, NOT_FINITE, openai_code="not_finite")
                if choice.finish:
                    continue
                text = choice.add_token(token)
                if choice.finish:
                    left -= 1
                    self.loop.cancel_job(keys[number])
                yield choice, text, token
        finally:
            for key in keys:
                self.loop.cancel_job(key)


def _free_bytes(device: torch.device) -> int:
    """Return the bytes for the cache: a quarter of the free memory, because the cache is copied when it grows."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return int(free) // 4


def make_application(engine: NativeEngine) -> Starlette:
    def answering(handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except ApiError as error:
                return JSONResponse(error.make_body(), error.status)
            except (ClientDisconnectedError, ClientDisconnect):
                return Response(status_code=499)

        return answer

    def generation(chat: bool) -> Callable[[Request], Awaitable[Response]]:
        async def generate(request: Request) -> Response:
            ask = engine.read_request(await request.body(), chat)
            reply = engine.make_reply(ask)
            if not ask.stream:
                return JSONResponse(await cancel_if_client_disconnects(request, _finish(engine, ask, reply)))
            tokens = engine.generate_tokens(ask, reply)
            first = await cancel_if_client_disconnects(
                request, anext(tokens)
            )  # a failure before the first token gives an HTTP status, not an event
            return StreamingResponse(_events(ask, reply, first, tokens), media_type="text/event-stream")

        return answering(generate)

    async def health(request: Request) -> Response:
        problem = engine.loop.health_problem
        return JSONResponse(
            {"ok": not problem, "problem": problem, **engine.loop.metric_counts}, 503 if problem else 200
        )

    async def tokenize(request: Request) -> Response:
        ids = engine.tokenize(await request.body())
        return JSONResponse({"tokens": ids, "count": len(ids)})

    async def metrics(request: Request) -> Response:
        lines = [f"factory_engine_{name} {value}\n" for name, value in engine.loop.metric_counts.items()]
        return PlainTextResponse("".join(lines))

    return Starlette(
        routes=[
            Route("/v1/chat/completions", generation(True), methods=["POST"]),
            Route("/v1/completions", generation(False), methods=["POST"]),
            Route("/tokenize", answering(tokenize), methods=["POST"]),
            Route("/health", health),
            Route("/metrics", metrics),
        ]
    )


async def _finish(engine: NativeEngine, ask: CompletionRequest, reply: CompletionReply) -> dict[str, Any]:
    async for _ in engine.generate_tokens(ask, reply):
        pass
    return reply.make_full_answer()


async def _events(
    ask: CompletionRequest, reply: CompletionReply, first: WrittenToken, tokens: AsyncIterator[WrittenToken]
) -> AsyncIterator[str]:
    """Yield server-sent events. A token that adds no final text waits for the next token of its choice."""
    waiting: dict[int, list[ComputedToken]] = {}
    begun: set[int] = set()
    try:
        async for choice, text, token in _chain(first, tokens):
            held = waiting.setdefault(choice.index, [])
            held.append(token)
            if text or choice.finish:
                yield _event(reply.make_chunk(choice, text, held, choice.index not in begun))
                begun.add(choice.index)
                held.clear()
        if ask.usage_in_stream:
            yield _event(reply.make_usage_chunk())
        yield "data: [DONE]\n\n"
    except ApiError as error:
        yield _event(error.make_body())


async def _chain(first: WrittenToken, others: AsyncIterator[WrittenToken]) -> AsyncIterator[WrittenToken]:
    yield first
    async for item in others:
        yield item


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def main(arguments: list[str]) -> int:
    export, socket = arguments
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        engine = NativeEngine(Path(export), device)
    except FactoryError as error:
        print(f"{MODEL_NAME}: {error}", file=sys.stderr)
        return error.exit_code
    options = uvicorn.Config(
        make_application(engine), uds=socket, log_level="warning", access_log=False, lifespan="off"
    )
    uvicorn.Server(options).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
