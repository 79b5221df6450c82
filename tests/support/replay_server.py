"""A real HTTP server on loopback that speaks ``/v1/chat/completions`` and plays a recorded session: tool calls, streaming, usage, and faults.

    python -m tests.support.replay_server SESSION.yaml [--port 8000]

A session is YAML: optional ``model`` and ``key`` (others get 404 and 401), and ``turns``. A turn is an answer, or a list of
answers to one request after the other, of which the last repeats. Turn *n* answers requests that hold *n* replies of the
assistant, so that a client that was killed and asks again gets the same one. ``Answer`` has what an answer may be.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pydantic import Field

from agents.llm.exchange import LlmError
from kernels.contract.strict import StrictSchema, parse
from kernels.contract.strict_yaml import read_yaml
from trainer.contract.errors import TrainerError, run_and_get_exit_code

PIECE = 24  # characters of a streamed chunk


class Call(StrictSchema):
    """A tool call. Its arguments are an object, or text that may not be JSON."""

    name: str
    arguments: dict[str, Any] | str


class Answer(StrictSchema):
    """A reply (``text``, ``calls``, with its ``usage``), or one fault: ``status`` (with ``headers`` and ``text``), ``hang`` or
    ``raw``, ``endless``, ``drop``."""

    text: str = ""
    calls: list[Call] = []
    finish: str = ""
    usage: dict[str, int] | None = None
    """``{"prompt_tokens": …, "completion_tokens": …}``; by default counted from the bytes."""
    status: int = 200
    headers: dict[str, str] = {}
    hang: float = Field(default=0.0, ge=0)
    """Seconds of silence before the answer."""
    endless: str = ""
    """A piece that is streamed until the client disconnects."""
    raw: str = ""
    """The body, unchanged."""
    drop: bool = False
    """The connection ends in the middle of the reply."""


class RecordedSession(StrictSchema):
    model: str = ""
    key: str = ""
    turns: list[Answer | list[Answer]]

    @classmethod
    def load(cls, path: Path) -> RecordedSession:
        """Raises: TrainerError that names the file and the key."""
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise TrainerError(f"{path}: {error.strerror}") from None
        return parse(cls, read_yaml(text, str(path), TrainerError), str(path), TrainerError)

    def answer(self, turn: int, asked_before: int) -> Answer | None:
        if turn >= len(self.turns):
            return None
        chosen = self.turns[turn]
        return chosen[min(asked_before, len(chosen) - 1)] if isinstance(chosen, list) else chosen


class ReplayServer:
    """Serves a session during the block; ``requests`` has the bodies of all requests."""

    def __init__(self, session: RecordedSession, port: int = 0) -> None:
        self.session = session
        self.requests: list[dict[str, Any]] = []
        self.asked: Counter[int] = Counter()
        self.closing = threading.Event()
        self.lock = threading.Lock()
        server = self

        class Handler(_Handler):
            replay = server

        try:
            self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise LlmError(f"port {port}: {error.strerror}") from None
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def __enter__(self) -> ReplayServer:
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()


class _Handler(BaseHTTPRequestHandler):
    replay: ReplayServer

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json(
                200, {"object": "list", "data": [{"id": self.replay.session.model or "replay", "object": "model"}]}
            )
        else:
            self._error(404, "no such address")

    def do_POST(self) -> None:
        session = self.replay.session
        authorization = self.headers.get("Authorization", "")
        if session.key and authorization != f"Bearer {session.key}":
            self._error(401, f"Incorrect API key provided: {authorization[7:]}")
        elif self.path != "/v1/chat/completions":
            self._error(404, "no such address")
        else:
            try:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
                turn = sum(message["role"] == "assistant" for message in body["messages"])
            except (ValueError, KeyError, TypeError) as error:
                self._error(400, f"not a request: {error}")
            else:
                self._complete(body, turn)

    def _complete(self, body: dict[str, Any], turn: int) -> None:
        session = self.replay.session
        if session.model and body.get("model") != session.model:
            self._error(404, f"The model {body.get('model')!r} does not exist")
            return
        with self.replay.lock:
            self.replay.requests.append(body)
            answer = session.answer(turn, self.replay.asked[turn])
            self.replay.asked[turn] += 1
        if answer is None:
            self._error(400, f"the session has no turn {turn}")
            return
        self.replay.closing.wait(answer.hang)
        if answer.status != 200:
            self._error(answer.status, answer.text or "as recorded", answer.headers)
        elif body.get("stream"):
            self._stream(answer, body)
        else:
            self._whole(answer, body)

    def _whole(self, answer: Answer, body: dict[str, Any]) -> None:
        if answer.raw:
            self._send(200, answer.raw.encode(), "application/json", {})
            return
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
        if answer.calls:
            message["tool_calls"] = [self._call(n, call) for n, call in enumerate(answer.calls)]
        choice = {"index": 0, "message": message, "finish_reason": self._finish(answer)}
        self._json(200, self._head("chat.completion", body) | {"choices": [choice], "usage": self._usage(answer, body)})

    def _stream(self, answer: Answer, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.close_connection = True
        head = self._head("chat.completion.chunk", body)
        delta = lambda part, finish=None: self._event(
            head | {"choices": [{"index": 0, "delta": part, "finish_reason": finish}]}
        )
        try:
            if answer.raw:
                self.wfile.write(answer.raw.encode())
                return
            delta({"role": "assistant", "content": ""})
            while answer.endless and not self.replay.closing.is_set():
                delta({"content": answer.endless})
                time.sleep(0.001)
            for start in range(0, len(answer.text), PIECE):
                delta({"content": answer.text[start : start + PIECE]})
            if answer.drop:
                return
            for number, call in enumerate(answer.calls):
                made = self._call(number, call)
                words = made["function"]["arguments"]
                first = made | {"index": number, "function": made["function"] | {"arguments": ""}}
                delta({"tool_calls": [first]})
                for start in range(0, len(words), PIECE):
                    delta({"tool_calls": [{"index": number, "function": {"arguments": words[start : start + PIECE]}}]})
            delta({}, self._finish(answer))
            if (body.get("stream_options") or {}).get("include_usage"):
                self._event(head | {"choices": [], "usage": self._usage(answer, body)})
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:  # the client went away
            return

    def _event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()

    @staticmethod
    def _call(number: int, call: Call) -> dict[str, Any]:
        words = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)
        function = {"name": call.name, "arguments": words}
        return {"id": f"call_{number}", "type": "function", "function": function}

    @staticmethod
    def _finish(answer: Answer) -> str:
        return answer.finish or ("tool_calls" if answer.calls else "stop")

    @staticmethod
    def _head(kind: str, body: dict[str, Any]) -> dict[str, Any]:
        return {"id": "chatcmpl-replay", "object": kind, "created": int(time.time()), "model": body.get("model", "")}

    @staticmethod
    def _usage(answer: Answer, body: dict[str, Any]) -> dict[str, int]:
        said = answer.text + "".join(str(call.arguments) for call in answer.calls)
        counts = {"prompt_tokens": len(json.dumps(body)) // 4, "completion_tokens": len(said) // 4 + 1}
        counts |= answer.usage or {}
        return counts | {"total_tokens": counts["prompt_tokens"] + counts["completion_tokens"]}

    def _error(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        kinds = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}
        error = {"message": message, "type": "error", "param": None, "code": kinds.get(status)}
        self._json(status, {"error": error}, headers)

    def _json(self, status: int, value: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), "application/json", headers or {})

    def _send(self, status: int, body: bytes, kind: str, headers: dict[str, str]) -> None:
        try:
            self.send_response(status)
            for key, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # the client went away
            return

    def log_message(self, *_: object) -> None:
        """Print nothing: ``requests`` has all requests."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.replay_server", description="Play a recorded session."
    )
    parser.add_argument("session", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()

    def serve() -> None:
        server = ReplayServer(RecordedSession.load(given.session), given.port)
        print(f"{given.session} on {server.url} (Ctrl-C ends it)", flush=True)
        with server:
            threading.Event().wait()

    try:
        return run_and_get_exit_code("replay_server", serve, LlmError)
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
