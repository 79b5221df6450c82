"""Clients of a server that ask again and again, and hold each answer to what its release would write."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import httpx

from tests.support.serving.served import PROMPT, continuation

AT_ONCE = 40
CUT = "\ufffd"  # a character that the limit cut: vLLM leaves it out
# Tokens of a client's requests: answers of one length would all come at once, with none in flight then.
WRITTEN = (60, 50, 40, 30)


class Load:
    """``clients`` of them, half of which stream, that ask again and again. Each answer is held to what its release would write."""

    def __init__(self, client: httpx.AsyncClient, exports: list[Path], clients: int = AT_ONCE) -> None:
        """``exports``: of the releases 1, 2 …, and then again from the first."""
        self.client, self.exports, self.clients = client, exports, clients
        self.answers: list[int] = []  # releases that answered
        self.moments: list[float] = []  # of those answers, by the monotonic clock
        self.failures: list[str] = []
        self.cut = 0  # streams that ended with an error event
        self.pause = 0.0  # seconds that a client waits after a failure
        self._on = True
        self._all = asyncio.Event()  # do all clients ask?
        self._all.set()

    async def __aenter__(self) -> Load:
        self._clients = [asyncio.ensure_future(self._client(number)) for number in range(self.clients)]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """A test that failed waits for no answer: there may be none."""
        if kind is not None:
            for client in self._clients:
                client.cancel()
            await asyncio.wait(self._clients)
            return
        await self.end()

    def calm(self) -> None:
        """Until ``hurry`` one client of ten asks, twice a second: an engine that comes up beside all of them takes a minute of a core more."""
        self._all.clear()

    def hurry(self) -> None:
        self._all.set()

    async def end(self) -> None:
        """No further request; those that are asked are waited for."""
        self._on = False
        self.hurry()
        await asyncio.gather(*self._clients)

    async def more(self, count: int) -> None:
        """Until ``count`` further answers came."""
        wanted = len(self.answers) + count
        while len(self.answers) < wanted:
            assert not all(client.done() for client in self._clients)
            await asyncio.sleep(0.02)

    async def _client(self, number: int) -> None:
        count = WRITTEN[number // 2 % len(WRITTEN)]
        while self._on:
            if number % 10:
                await self._all.wait()
            elif not self._all.is_set():
                await asyncio.sleep(0.5)
            try:
                release, text = await (self._streamed(count) if number % 2 else self._whole(count))
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(self.pause)
                continue
            if text is None:
                self.cut += 1
            elif text.rstrip(CUT) != self._expected(release, count).rstrip(CUT):
                self.failures.append(f"release {release} wrote {text!r}")
            self.answers.append(release)
            self.moments.append(time.monotonic())

    def _expected(self, release: int, count: int) -> str:
        return continuation(self.exports[(release - 1) % len(self.exports)], PROMPT, count)

    async def _whole(self, count: int) -> tuple[int, str | None]:
        body = {"prompt": PROMPT, "max_tokens": count}
        answer = await self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return int(answer.headers["x-factory-release"]), answer.json()["choices"][0]["text"]

    async def _streamed(self, count: int) -> tuple[int, str | None]:
        body = {"prompt": PROMPT, "max_tokens": count, "stream": True}
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
        if "error" in lines[-1]:
            return int(answer.headers["x-factory-release"]), None
        assert lines[-1] == "[DONE]"
        parts = [json.loads(line)["choices"][0]["text"] for line in lines[:-1]]
        return int(answer.headers["x-factory-release"]), "".join(parts)
