"""Who writes: a release, behind an engine as ``factory serve`` starts one, or a model at an OpenAI-compatible address; and how it is asked."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from agents.core.untrusted import one_line
from agents.llm.exchange import LlmError
from agents.llm.http_endpoint import HttpEndpoint
from agents.llm.policy import LlmPolicy
from factory.core.errors import FactoryError, InputError
from factory.core.workspace import Workspace
from factory.evals.export_folder import read_config
from factory.ingest.document import Content, written_by
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger
from factory.ledger.rows import ReleaseRow, champion
from factory.serving.champion import Champion
from factory.serving.engines import Engine, native

BATCH = 16  # documents that are written at the same time
FIRST_WAIT = 0.5  # seconds before a second attempt; doubled each time
REFUSED = (400, 413, 422)  # statuses that are about one prompt
UNREADABLE = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)


class WriterError(FactoryError):
    """The model stopped answering; what it wrote so far is kept."""


@dataclass(frozen=True)
class Answer:
    """``end``: 'stop' (it ended by itself), 'length' (it was cut off), or 'refused' (``text`` is why)."""

    text: str
    end: str


@dataclass(frozen=True)
class TextWriter:
    """``release`` with its export, or ``url`` with ``model``. ``name`` is what ``synthetic_by`` says."""

    name: str
    release: int = 0
    export: str = ""
    export_sha256: str = ""
    url: str = ""
    model: str = ""

    @property
    def slug(self) -> str:
        """Of a file's name."""
        letters = "".join(c if c.isascii() and c.isalnum() else "-" for c in (self.model or f"release-{self.release}"))
        return letters.strip("-").lower()[:60] or "model"


def release_writer(ledger: Ledger, number: int | None) -> TextWriter:
    """Release ``number``, the champion without one. Raises: InputError when there is none, or its export is not what was judged."""
    row = ReleaseRow.get(ledger, number) if number is not None else champion(ledger)
    if row is None:
        raise InputError(
            "nothing is released yet, so there is no champion to write: name an endpoint with --endpoint URL --model NAME"
        )
    Champion(row.number, Path(row.export_path), row.export_sha256).check()
    return TextWriter(written_by(row.number, row.export_sha256), row.number, row.export_path, row.export_sha256)


def endpoint_writer(url: str, model: str, policy: LlmPolicy) -> TextWriter:
    """Raises: InputError for an address, key or model that cannot be."""
    try:
        HttpEndpoint(url, _key(), policy.model_copy(update={"model": model}))
    except LlmError as error:
        raise InputError(str(error)) from None
    parts = urlsplit(url)
    shown = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
    return TextWriter(one_line(f"{model} at {shown}", 300), url=url, model=model)


def _key() -> str:
    return os.environ.get("OPENAI_API_KEY", "")


@asynccontextmanager
async def opened(
    writer: TextWriter, workspace: Workspace, policy: LlmPolicy, say: Callable[[str], None]
) -> AsyncIterator[WriterClient]:
    """The model, ready to be asked; a release's engine ends with the block. Raises: InputError; EngineError."""
    if writer.url:
        timeout = httpx.Timeout(policy.reply_seconds, read=min(policy.silence_seconds, policy.reply_seconds))
        headers = {"Authorization": f"Bearer {_key() or 'none'}", "Accept-Encoding": "identity"}
        async with httpx.AsyncClient(timeout=timeout, headers=headers, follow_redirects=False) as client:
            yield WriterClient(writer, policy, client, writer.url.rstrip("/"), say)
        return
    export = Champion(writer.release, Path(writer.export), writer.export_sha256)
    export.check()
    say(f"release {writer.release} comes up")
    logs = workspace.logs / "generate"  # apart from those of a 'factory serve' that runs beside
    logs.mkdir(parents=True, exist_ok=True)
    engine = await Engine.start(native(), export, logs)
    try:
        await engine.wait_ready()
        yield WriterClient(writer, policy, engine.client, "/v1", say, engine)
    finally:
        await engine.stop()


@dataclass
class WriterClient:
    """One model, asked by many at once."""

    writer: TextWriter
    policy: LlmPolicy
    client: httpx.AsyncClient
    base: str
    say: Callable[[str], None]
    engine: Engine | None = None

    @cached_property
    def _reads(self) -> tuple[Tokenizer, int]:
        """A release's tokenizer, and how many tokens it can read."""
        return Tokenizer.load(Path(self.writer.export)), read_config(Path(self.writer.export)).context

    @property
    def at_once(self) -> tuple[int, int]:
        """How many prompts go into one request, and how many requests are under way: a release's engine gets a batch at a time."""
        return (BATCH, 1) if self.engine else (1, BATCH)

    async def answers(self, prompts: Sequence[Content], tokens: int, temperature: float, seed: int) -> list[Answer]:
        """What the model writes after each of the prompts, at most ``tokens`` tokens. Raises: WriterError."""
        body: dict[str, Any] = {"temperature": temperature, "seed": seed}
        if self.engine:
            return await self._batch(prompts, body | {"max_tokens": tokens})
        (prompt,) = prompts
        body["model"] = self.writer.model
        if "text" in prompt:
            path, body = "/completions", body | {"prompt": prompt["text"], "max_tokens": tokens}
        else:
            path = "/chat/completions"
            body |= {"messages": prompt["messages"], self.policy.limit_parameter: tokens}
        found = await self._ask(path, body)
        return [Answer(found, "refused")] if isinstance(found, str) else found

    async def _batch(self, prompts: Sequence[Content], body: dict[str, Any]) -> list[Answer]:
        """All in one request, chats too, as token ids: so they share their batches whatever else is going on, and the same seed draws the same
        tokens."""
        tokenizer, context = self._reads
        ids = [
            (tokenizer.text_prompt(p["text"]) if "text" in p else tokenizer.prompt(p["messages"])).tolist()
            for p in prompts
        ]
        fits = [number for number, one in enumerate(ids) if one and len(one) + body["max_tokens"] <= context]
        why = f"the prompt and {body['max_tokens']} tokens do not fit its context of {context}"
        answers = [Answer(why, "refused")] * len(prompts)
        if fits:
            found = await self._ask("/completions", body | {"prompt": [ids[number] for number in fits]}, len(fits))
            if isinstance(found, str):
                raise WriterError(f"{self.writer.name}: {found}")
            for number, answer in zip(fits, found, strict=True):
                answers[number] = answer
        return answers

    async def _ask(self, path: str, body: Mapping[str, Any], count: int = 1) -> list[Answer] | str:
        """``count`` answers, or why the prompt is refused. Raises: WriterError."""
        # Of an endpoint, which may send a byte now and then for ever; the engine is ours, and ends or answers.
        within = None if self.engine else self.policy.reply_seconds
        for attempt in range(1, self.policy.attempts + 1):
            try:
                async with asyncio.timeout(within):
                    status, content = await self._post(path, body)
            except TimeoutError:
                why = f"no whole answer within {within:g} s (llm.reply_seconds in agents.yaml)"
            except httpx.HTTPError as error:
                if self.engine and (how := await self.engine.end()):
                    raise WriterError(how) from None
                why = f"no answer: {type(error).__name__} {error}".strip()
            else:
                if status == 200:
                    try:
                        return _read(content, count)
                    except UNREADABLE as error:
                        why = f"its answer cannot be read ({type(error).__name__}): {_said(content)}"
                else:
                    why = f"status {status}: {_said(content)}"
                if status in REFUSED:
                    return _said(content)
                if status not in (200, 408, 409, 429) and status < 500:
                    raise WriterError(f"{self.writer.name}: {why}{_advice(status, path)}")
            if attempt < self.policy.attempts:
                wait = min(FIRST_WAIT * 2 ** (attempt - 1), self.policy.longest_wait_seconds)
                self.say(f"  {self.writer.name}: {why}; again in {wait:.1f} s")
                await asyncio.sleep(wait)
        raise WriterError(f"{self.writer.name}: {why} (tried {self.policy.attempts} times)")

    async def _post(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        content = bytearray()
        async with self.client.stream("POST", self.base + path, json=body) as answer:
            async for part in answer.aiter_bytes():
                content += part
                if len(content) > self.policy.reply_bytes:
                    raise WriterError(f"{self.writer.name}: its answer is longer than {self.policy.reply_bytes} bytes")
        return answer.status_code, bytes(content)


def _read(content: bytes, count: int) -> list[Answer]:
    """The first choices, of a completion or a chat. Raises: UNREADABLE."""
    choices = json.loads(content)["choices"]
    return [_answer(choices[number]) for number in range(count)]


def _answer(choice: Any) -> Answer:
    words = choice["message"].get("content") if "message" in choice else choice["text"]
    words = words or ""  # null or left out: nothing was said
    words = words.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # half of a pair is no text
    if choice.get("finish_reason") == "length":
        return Answer(words.rstrip("\ufffd"), "length")  # cut off in the midst of a character
    return Answer(words, "stop")


def _said(content: bytes) -> str:
    try:
        said = json.loads(content)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        said = content.decode("utf-8", "replace")
    key = _key()
    return one_line(str(said).replace(key, "[key]") if len(key) >= 4 else str(said), 300)


def _advice(status: int, path: str) -> str:
    if 300 <= status < 400:
        return ": it leads to another address, which the key does not follow: name that one with --endpoint"
    if status in (401, 403):
        return ": set OPENAI_API_KEY"
    if status == 404 and path == "/completions":
        return ": it may know no model of that name, or answer chats alone: give prompts as 'messages' then (--prompts FILE)"
    return ""
