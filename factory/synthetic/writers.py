"""The writer of documents, and the requests to it. A writer is a release in an engine of ``factory serve``, or a model at an OpenAI-compatible
address."""

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

from agents.core.untrusted import fold_to_one_line
from agents.llm.exchange import LlmError
from agents.llm.http_endpoint import HttpEndpoint
from agents.llm.policy import LlmPolicy
from factory.core.errors import FactoryError, InputError
from factory.core.workspace import Workspace
from factory.evals.export_folder import read_config
from factory.ingest.document import Content, format_release_as_author
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger
from factory.ledger.rows import ReleaseRow, find_champion
from factory.serving.champion import Champion
from factory.serving.engines import Engine, make_native_engine_kind
from kernels.contract.message import Message

BATCH = 16  # documents that are written at the same time
FIRST_WAIT = 0.5  # seconds before the second attempt; doubled before each further attempt
REFUSED = (400, 413, 422)  # HTTP statuses that refuse one prompt
UNREADABLE = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)


class WriterError(FactoryError):
    """The model gives no more answers. The answers so far are kept."""


@dataclass(frozen=True)
class Answer:
    """One answer. ``end``: 'stop' (the model ended it), 'length' (it reached the limit of tokens), or 'refused' (``text`` is the reason)."""

    text: str
    end: str


@dataclass(frozen=True)
class TextWriter:
    """A model that writes: ``release`` with its export, or ``url`` with ``model``. ``name`` is the ``synthetic_by`` of its documents."""

    name: str
    release: int = 0
    export: str = ""
    export_sha256: str = ""
    url: str = ""
    model: str = ""

    @property
    def file_name_part(self) -> str:
        """The writer's name as a part of a file's name."""
        letters = "".join(c if c.isascii() and c.isalnum() else "-" for c in (self.model or f"release-{self.release}"))
        return letters.strip("-").lower()[:60] or "model"


def find_release_writer(ledger: Ledger, number: int | None) -> TextWriter:
    """The writer for release ``number``, or for the champion. Raises: InputError if the release does not exist or its export was not judged."""
    row = ReleaseRow.get(ledger, number) if number is not None else find_champion(ledger)
    if row is None:
        raise InputError(
            "synthetic.no_release",
            "no model is released yet, so there is no champion that could write. Give an endpoint with --endpoint URL --model NAME",
        )
    Champion(row.number, Path(row.export_path), row.export_sha256).check_export()
    return TextWriter(
        format_release_as_author(row.number, row.export_sha256), row.number, row.export_path, row.export_sha256
    )


def make_endpoint_writer(url: str, model: str, policy: LlmPolicy) -> TextWriter:
    """The model at an address. Raises: InputError for an impossible address, key or model."""
    try:
        HttpEndpoint(url, _key(), policy.model_copy(update={"model": model}))
    except LlmError as error:
        raise InputError("synthetic.endpoint", "the endpoint cannot be used: {error}", error=error) from None
    parts = urlsplit(url)
    shown = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
    return TextWriter(fold_to_one_line(f"{model} at {shown}", 300), url=url, model=model)


def _key() -> str:
    return os.environ.get("OPENAI_API_KEY", "")


@asynccontextmanager
async def open_writer(
    writer: TextWriter, workspace: Workspace, policy: LlmPolicy, say: Callable[[str], None]
) -> AsyncIterator[WriterClient]:
    """A client of the model, ready for requests. A release's engine runs until the block ends. Raises: InputError; EngineError."""
    if writer.url:
        timeout = httpx.Timeout(policy.reply_seconds, read=min(policy.silence_seconds, policy.reply_seconds))
        headers = {"Authorization": f"Bearer {_key() or 'none'}", "Accept-Encoding": "identity"}
        async with httpx.AsyncClient(timeout=timeout, headers=headers, follow_redirects=False) as client:
            yield WriterClient(writer, policy, client, writer.url.rstrip("/"), say)
        return
    export = Champion(writer.release, Path(writer.export), writer.export_sha256)
    export.check_export()
    say(Message("synthetic.starts", "the engine of release {release} starts", release=writer.release))
    logs = workspace.logs / "generate"  # a 'factory serve' may run at the same time, with logs of its own
    logs.mkdir(parents=True, exist_ok=True)
    engine = await Engine.start(make_native_engine_kind(), export, logs)
    try:
        await engine.wait_until_ready()
        yield WriterClient(writer, policy, engine.client, "/v1", say, engine)
    finally:
        await engine.stop()


@dataclass
class WriterClient:
    """A client of one model, for many requests at once."""

    writer: TextWriter
    policy: LlmPolicy
    client: httpx.AsyncClient
    base: str
    say: Callable[[str], None]
    engine: Engine | None = None

    @cached_property
    def _reads(self) -> tuple[Tokenizer, int]:
        """(a release's tokenizer, the length of its context in tokens)."""
        return Tokenizer.load(Path(self.writer.export)), read_config(Path(self.writer.export)).context

    @property
    def batch_size_and_concurrency(self) -> tuple[int, int]:
        """(prompts in one request, requests at the same time). A release's engine gets one batch at a time."""
        return (BATCH, 1) if self.engine else (1, BATCH)

    async def request_answers(
        self, prompts: Sequence[Content], tokens: int, temperature: float, seed: int
    ) -> list[Answer]:
        """The model's answer to each prompt, of at most ``tokens`` tokens. Raises: WriterError."""
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
        """Answer all prompts by one request, which has them as token ids. The prompts then always form the same batches, so the same seed
        gives the same tokens."""
        tokenizer, context = self._reads
        ids = [
            (
                tokenizer.encode_text_prompt(p["text"]) if "text" in p else tokenizer.encode_chat_prompt(p["messages"])
            ).tolist()
            or [tokenizer.end_token]  # no text and no BOS: in training, a document follows the end of another
            for p in prompts
        ]
        fits = [number for number, one in enumerate(ids) if one and len(one) + body["max_tokens"] <= context]
        why = Message(
            "synthetic.long_prompt",
            "the prompt and an answer of {tokens} tokens do not fit the model's context of {context} tokens",
            tokens=body["max_tokens"],
            context=context,
        )
        answers = [Answer(why, "refused")] * len(prompts)
        if fits:
            found = await self._ask("/completions", body | {"prompt": [ids[number] for number in fits]}, len(fits))
            if isinstance(found, str):
                raise WriterError(
                    "synthetic.batch_refused", "{writer} refused a batch: {why}", writer=self.writer.name, why=found
                )
            for number, answer in zip(fits, found, strict=True):
                answers[number] = answer
        return answers

    async def _ask(self, path: str, body: Mapping[str, Any], count: int = 1) -> list[Answer] | str:
        """``count`` answers, or the reason why the model refuses the prompt. Raises: WriterError."""
        # An endpoint may send single bytes for ever, so its answer has a time limit. Our own engine always answers or ends.
        within = None if self.engine else self.policy.reply_seconds
        for attempt in range(1, self.policy.attempts + 1):
            try:
                async with asyncio.timeout(within):
                    status, content = await self._post(path, body)
            except TimeoutError:
                why = Message(
                    "synthetic.slow_answer",
                    "no complete answer came within {seconds:g} s (llm.reply_seconds in agents.yaml)",
                    seconds=within,
                )
            except httpx.HTTPError as error:
                if self.engine and (how := await self.engine.wait_for_end()):
                    raise WriterError("synthetic.engine_ended", "{how}", how=how) from None
                why = Message(
                    "synthetic.no_answer", "no answer came: {error}", error=f"{type(error).__name__} {error}".strip()
                )
            else:
                if status == 200:
                    try:
                        return _read(content, count)
                    except UNREADABLE as error:
                        why = Message(
                            "synthetic.unreadable_answer",
                            "the answer cannot be read ({kind}): {answer}",
                            kind=type(error).__name__,
                            answer=_said(content),
                        )
                else:
                    why = Message(
                        "synthetic.status",
                        "the endpoint answered with status {status}: {answer}",
                        status=status,
                        answer=_said(content),
                    )
                if status in REFUSED:
                    return _said(content)
                if status not in (200, 408, 409, 429) and status < 500:
                    advice = _advice(status, path)
                    raise WriterError(
                        "synthetic.refused",
                        "{writer}: {why}{advice}",
                        writer=self.writer.name,
                        why=why,
                        advice=Message("synthetic.advice", " ({advice})", advice=advice) if advice else "",
                    )
            if attempt < self.policy.attempts:
                wait = min(FIRST_WAIT * 2 ** (attempt - 1), self.policy.longest_wait_seconds)
                self.say(
                    Message(
                        "synthetic.again",
                        "  {writer}: {why}. The next attempt is in {seconds:.1f} s",
                        writer=self.writer.name,
                        why=why,
                        seconds=wait,
                    )
                )
                await asyncio.sleep(wait)
        raise WriterError(
            "synthetic.gave_up",
            "{writer} gave no usable answer in {attempts:,|attempt|attempts}: {why}",
            writer=self.writer.name,
            why=why,
            attempts=self.policy.attempts,
        )

    async def _post(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        content = bytearray()
        async with self.client.stream("POST", self.base + path, json=body) as answer:
            async for part in answer.aiter_bytes():
                content += part
                if len(content) > self.policy.reply_bytes:
                    raise WriterError(
                        "synthetic.long_answer",
                        "{writer}: the answer has more than {limit} bytes (llm.reply_bytes in agents.yaml)",
                        writer=self.writer.name,
                        limit=self.policy.reply_bytes,
                    )
        return answer.status_code, bytes(content)


def _read(content: bytes, count: int) -> list[Answer]:
    """The first ``count`` choices of a completion or a chat. Raises: UNREADABLE."""
    choices = json.loads(content)["choices"]
    return [_answer(choices[number]) for number in range(count)]


def _answer(choice: Any) -> Answer:
    words = choice["message"].get("content") if "message" in choice else choice["text"]
    words = words or ""  # null, or no key: an empty answer
    words = words.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # replaces half surrogate pairs
    if choice.get("finish_reason") == "length":
        return Answer(words.rstrip("\ufffd"), "length")  # the answer may end inside a character
    return Answer(words, "stop")


def _said(content: bytes) -> str:
    try:
        said = json.loads(content)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        said = content.decode("utf-8", "replace")
    key = _key()
    return fold_to_one_line(str(said).replace(key, "[key]") if len(key) >= 4 else str(said), 300)


def _advice(status: int, path: str) -> Message | None:
    if 300 <= status < 400:
        return Message(
            "synthetic.redirected",
            "The endpoint redirects to another address. The factory sends the API key only to the address that you gave. Give the new "
            "address as --endpoint",
        )
    if status in (401, 403):
        return Message("synthetic.no_key", "Set the environment variable OPENAI_API_KEY")
    if status == 404 and path == "/completions":
        return Message(
            "synthetic.chats_only",
            "Perhaps the endpoint has no model of this name. Or perhaps it accepts only chats. In this case, give prompts as "
            "'messages' (--prompts FILE)",
        )
    return None
