"""The endpoint for any server with ``/v1/chat/completions``, through the ``openai`` package.

Replies are streamed, and limited in bytes, tokens and seconds.
The ``client`` retries, not the package, so that each attempt is in the books. The key goes into the request's header only. If the server's
answer repeats the key, the key is removed from it.
"""

from __future__ import annotations

import email.utils
import importlib
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from agents.core.untrusted import fold_to_one_line
from agents.llm.exchange import MOST_CALLS, LlmError, Reply, Request, SendError, read_reply
from agents.llm.policy import LlmPolicy
from kernels.contract.message import Message

SLACK = 16  # chunks of a stream that carry no token: the role, the end, the usage
LOCAL = ("localhost", "127.0.0.1", "::1")


class HttpEndpoint:
    """Sends requests to a server. Raises: LlmError for an invalid URL, or a missing key or model."""

    def __init__(self, url: str, key: str, policy: LlmPolicy) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
            shown = f"{parts.scheme}://{parts.hostname}…" if parts.username or parts.password else repr(url)
            raise LlmError(
                "llm.wrong_url",
                "endpoint {url}: expected a base URL like https://host/v1, without a user name or password in it.",
                url=shown,
            )
        if not policy.model:
            raise LlmError(
                "llm.no_model",
                "endpoint {url}: no model is set. Set llm.model in policies/agents.yaml, or give --model.",
                url=url,
            )
        if not key and parts.hostname not in LOCAL:
            raise LlmError(
                "llm.no_key",
                "endpoint {url}: no key is set. Set the environment variable OPENAI_API_KEY (to any word if the server needs no key).",
                url=url,
            )
        self.name, self.policy = url, policy
        self._url, self._key = url, key
        self._client: Any = None
        self._reading = _Reading(policy)

    def send(self, request: Request) -> Reply:
        import openai

        self._reading = _Reading(self.policy)
        try:
            body = request.make_request_body() | {"stream": True, "stream_options": {"include_usage": True}}
            body[self.policy.limit_parameter] = body.pop("max_completion_tokens")
            with self._open().chat.completions.create(**body) as stream:
                return self._collect(stream, request)
        except SendError:
            raise
        except openai.APIStatusError as error:
            raise self._refused(error, request) from None
        except openai.APIConnectionError as error:  # time-outs are connection errors too
            cause = error.__cause__
            if isinstance(cause, SendError):
                raise cause from None
            late = isinstance(error, openai.APITimeoutError)
            charged = self._reading.bytes > 0 or late
            if late:
                seconds = self.policy.silence_seconds
                raise SendError(
                    "llm.silent",
                    "the server sent no byte for {seconds:g} s",
                    seconds=seconds,
                    again=True,
                    charged=charged,
                ) from None
            problem = self._said(str(cause or error))
            raise SendError(
                "llm.no_connection", "the connection failed ({problem})", problem=problem, again=True, charged=charged
            ) from None
        except openai.OpenAIError as error:  # an error that the stream itself carried
            raise _failed(self._said(str(error)), charged=True) from None
        except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError) as error:
            problem = self._said(f"{type(error).__name__}: {error}")
            raise SendError(
                "llm.unreadable", "the reply cannot be read ({problem})", problem=problem, again=True, charged=True
            ) from None

    def _open(self) -> Any:
        if self._client is None:
            import openai

            silence = self.policy.silence_seconds
            http = openai.DefaultHttpxClient(
                follow_redirects=False,  # a redirect would take the key elsewhere
                headers={"Accept-Encoding": "identity"},
                event_hooks={"response": [lambda response: self._reading.bound(response)]},
            )
            self._client = openai.OpenAI(
                base_url=self._url, api_key=self._key or "none", max_retries=0, http_client=http
            ).with_options(timeout=min(silence, self.policy.reply_seconds))
        return self._client

    def _collect(self, stream: Any, request: Request) -> Reply:
        """The reply, joined from the chunks of a stream. Raises: SendError."""
        text: list[str] = []
        calls: dict[int, dict[str, str]] = {}
        finish, usage, chunks = "", None, 0
        for chunk in stream:
            chunks += 1
            if chunks > request.reply_tokens + SLACK:
                raise SendError(
                    "llm.too_many_tokens",
                    "the reply was cut off, because it is longer than the {limit} tokens that the request allows",
                    limit=request.reply_tokens,
                    again=False,
                    charged=True,
                )
            usage = getattr(chunk, "usage", None) or usage
            for choice in chunk.choices or []:
                finish = choice.finish_reason or finish
                delta = choice.delta
                text.append(delta.content or "")
                for part in delta.tool_calls or []:
                    at = part.index
                    if at is None:  # some servers send whole calls, without a number
                        at = len(calls) if part.id else len(calls) - 1
                    if at not in calls and len(calls) >= MOST_CALLS:
                        continue
                    call = calls.setdefault(at, {"id": "", "name": "", "arguments": ""})
                    call["id"] = part.id or call["id"]
                    if part.function is not None:
                        call["name"] = part.function.name or call["name"]
                        call["arguments"] += part.function.arguments or ""
        if not finish:
            raise SendError("llm.broke_off", "the reply stopped before it was complete", again=True, charged=True)
        message = {"content": self._clean("".join(text)), "tool_calls": [calls[n] for n in sorted(calls)]}
        if finish == "length" and not message["content"] and not calls:
            message["content"] = Message(
                "llm.used_up", "[the model reached the token limit of the reply before it wrote any text]"
            )
        return read_reply(message, usage.model_dump() if usage is not None else None, finish)

    def _refused(self, error: Any, request: Request) -> SendError:
        status = error.status_code
        body = error.body if isinstance(error.body, dict) else {}
        said = self._said(str(body.get("message") or error.message))
        if status in (401, 403):
            return SendError(
                "llm.key_refused",
                "the server refused the key ({status}: {said}); set OPENAI_API_KEY to a valid key",
                status=status,
                said=said,
                again=False,
                charged=False,
            )
        if status == 404:
            return SendError(
                "llm.not_found",
                "the server has no model {model!r}, or {url} is not its address (404: {said}); set llm.model, or give --model",
                model=request.model,
                url=self._url,
                said=said,
                again=False,
                charged=False,
            )
        if status == 429 and getattr(error, "code", None) != "insufficient_quota":
            after = _retry_after(error)
            return SendError(
                "llm.busy", "the server is busy (429: {said})", said=said, again=True, charged=False, after=after
            )
        if status in (408, 409) or status >= 500:
            return _failed(f"{status}: {said}", charged=True, after=_retry_after(error))
        return SendError(
            "llm.refused",
            "the server refused the request ({status}: {said})",
            status=status,
            said=said,
            again=False,
            charged=False,
        )

    def _said(self, text: str) -> str:
        """The server's error message as one line, without the key."""
        return fold_to_one_line(self._clean(text), 300)

    def _clean(self, text: str) -> str:
        return text.replace(self._key, "[key]") if len(self._key) >= 4 else text


class _Reading:
    """Limits the bytes and seconds of one answer before anything of it is parsed."""

    def __init__(self, policy: LlmPolicy) -> None:
        self.policy, self.bytes = policy, 0
        self.began = time.monotonic()

    def take(self, count: int) -> None:
        self.bytes += count
        policy = self.policy
        if self.bytes > policy.reply_bytes:
            raise SendError(
                "llm.too_many_bytes",
                "the reply was cut off, because it is longer than {limit} bytes",
                limit=policy.reply_bytes,
                again=False,
                charged=True,
            )
        if time.monotonic() - self.began > policy.reply_seconds:
            raise SendError(
                "llm.too_slow",
                "the reply was cut off, because it took longer than {limit:g} s",
                limit=policy.reply_seconds,
                again=True,
                charged=True,
            )

    def bound(self, response: Any) -> None:
        """Count the bytes of ``response`` as they are read."""
        if response.headers.get("content-encoding", "identity") != "identity":
            raise SendError(
                "llm.compressed",
                "the server compressed its answer, although the request did not ask for compression",
                again=False,
                charged=True,
            )
        httpx = importlib.import_module(type(response).__module__.partition(".")[0])  # whichever one openai uses
        inner, take = response.stream, self.take

        class Counted(httpx.SyncByteStream):  # type: ignore[misc, name-defined]
            def __iter__(self) -> Iterator[bytes]:
                for chunk in inner:
                    take(len(chunk))
                    yield chunk

            def close(self) -> None:
                inner.close()

        response.stream = Counted()


def _failed(problem: str, *, charged: bool, after: float | None = None) -> SendError:
    return SendError(
        "llm.failed", "the server failed ({problem})", problem=problem, again=True, charged=charged, after=after
    )


def _retry_after(error: Any) -> float | None:
    """Seconds, from either form of the header (RFC 9110 §10.2.3); None: no header that can be read."""
    raw = error.response.headers.get("retry-after", "")
    try:
        seconds = float(raw)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(raw).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return max(0.0, seconds) if seconds < float("inf") else None
