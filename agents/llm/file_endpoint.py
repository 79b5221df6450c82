"""A folder in place of a server. Each request is written as a file, and each reply is read from a file. A person can be the model.

``NAME.request.json`` is the body that a server would get. The reply goes to ``NAME.reply.json``; write the file under another name first, then
rename it. It holds the API's whole answer, only the answer's message, or ``{"content": "…", "tool_calls": [{"name": "…", "arguments": {…}}]}``. The
same request gets the same name. Therefore a run that continues after a kill finds a reply that came in the meantime.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents.llm.exchange import LlmError, Reply, Request, SendError, read_reply
from agents.llm.policy import LlmPolicy
from kernels.contract.files import write_atomically
from kernels.contract.message import Message

POLL_SECONDS = 0.2


class FileEndpoint:
    """Sends requests as files in a folder. Raises: LlmError if the folder cannot be made or written to."""

    def __init__(self, folder: Path, policy: LlmPolicy, say: Callable[[str], None] = lambda _: None) -> None:
        self.name, self.folder, self.policy, self.say = f"files:{folder}", folder, policy, say
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LlmError(
                "llm.no_folder",
                "endpoint {endpoint}: the folder cannot be created ({problem}).",
                endpoint=self.name,
                problem=error.strerror,
            ) from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise LlmError(
                "llm.not_writable",
                "endpoint {endpoint}: the current user may not write to the folder.",
                endpoint=self.name,
            )

    def send(self, request: Request) -> Reply:
        body = json.dumps(request.make_request_body(), indent=1, ensure_ascii=False).encode("utf-8", "replace")
        name = f"{request.label}-{hashlib.sha256(body).hexdigest()[:12]}"
        asked, answered = (self.folder / f"{name}.{kind}.json" for kind in ("request", "reply"))
        try:
            if not asked.exists():
                write_atomically(asked, body)
        except OSError as error:
            raise SendError(
                "llm.request_not_written",
                "{file} cannot be written: {problem}",
                file=str(asked),
                problem=error.strerror,
                again=False,
                charged=False,
            ) from None
        deadline, shown = time.monotonic() + self.policy.file_wait_seconds, ""
        while True:
            wrong = Message("llm.waiting", "waiting for {file}", file=str(answered))
            try:
                return _read(answered, self.policy.reply_bytes)
            except FileNotFoundError:
                pass
            except (ValueError, OSError, RecursionError) as error:
                wrong = Message(
                    "llm.reply_unusable", "{file} cannot be used yet: {problem}", file=str(answered), problem=str(error)
                )
            if wrong != shown:
                self.say(Message("llm.file_state", "  {state}", state=wrong))
                shown = wrong
            if time.monotonic() > deadline:
                raise SendError(
                    "llm.no_file_in_time",
                    "no usable reply came within {seconds:g} s ({state}); run the same command again to continue",
                    seconds=self.policy.file_wait_seconds,
                    state=wrong,
                    again=False,
                    charged=False,
                )
            time.sleep(POLL_SECONDS)


def _read(path: Path, limit: int) -> Reply:
    """The reply in a file. Raises: FileNotFoundError; OSError; ValueError that says what is wrong with the file."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > limit:
            raise ValueError(f"it holds more than {limit} bytes")
        raw: Any = json.loads(file.read(limit + 1).decode("utf-8"))
    if isinstance(raw, dict) and isinstance(choices := raw.get("choices"), list):
        if not choices or not isinstance(choices[0], dict):
            raise ValueError("'choices' holds no message")
        return read_reply(choices[0].get("message"), raw.get("usage"), str(choices[0].get("finish_reason") or ""))
    return read_reply(raw, raw.get("usage") if isinstance(raw, dict) else None)
