"""Where a message goes: a webhook that gets it by POST, a command that reads it. Each within a time limit."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import os
import signal
import socket
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from factory.core.errors import FactoryError
from factory.notifying.policy import NotificationPolicy
from kernels.contract.files import finite_json

SECRET = "FACTORY_WEBHOOK_SECRET"
SAID_BYTES = 300


class NotDeliveredError(FactoryError):
    """A receiver did not take a message: it gets it again."""


class Receiver(Protocol):
    def deliver(self, message: dict[str, Any]) -> None:
        """Raises: NotDeliveredError."""


def receivers(policy: NotificationPolicy, folder: Path) -> dict[str, Receiver]:
    """By name, those that the policy has."""
    found: dict[str, Receiver] = {}
    if policy.webhook:
        found["webhook"] = Webhook(policy.webhook, policy.timeout_seconds)
    if policy.command:
        found["command"] = Command(tuple(policy.command), policy.timeout_seconds, folder)
    return found


@dataclass(frozen=True)
class Webhook:
    """POSTs JSON; any answer of 2xx means delivered. A redirect is not followed."""

    url: str
    seconds: float

    def deliver(self, message: dict[str, Any]) -> None:
        body = finite_json(message).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "factory", "X-Factory-Event": str(message["id"])}
        if secret := os.environ.get(SECRET, ""):
            headers["X-Factory-Signature"] = "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.seconds)
        late = threading.Event()
        limit = threading.Timer(self.seconds, _cut, [connection, late])  # of all of it: each read has the connection's
        limit.start()
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("POST", target, body, headers)
            status = connection.getresponse().status
            if late.is_set():  # a connection that is cut looks like the end of the headers
                raise TimeoutError("the answer took too long")
        except (OSError, http.client.HTTPException) as error:
            when = f" within {self.seconds:g} s" if late.is_set() else ""
            why = f"{type(error).__name__}: {error}"
            raise NotDeliveredError(f"the webhook at {parts.hostname} did not answer{when} ({why})") from error
        finally:
            limit.cancel()
            connection.close()
        if not 200 <= status < 300:
            raise NotDeliveredError(f"the webhook at {parts.hostname} answered {status}")


def _cut(connection: http.client.HTTPConnection, late: threading.Event) -> None:
    late.set()
    if connection.sock is not None:
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class Command:
    """Runs words, without a shell, with the message on standard input; exit 0 means delivered."""

    words: tuple[str, ...]
    seconds: float
    folder: Path

    def deliver(self, message: dict[str, Any]) -> None:
        name = self.words[0]
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
            given.write(finite_json(message).encode() + b"\n")
            given.seek(0)
            try:
                process = subprocess.Popen(
                    self.words,
                    stdin=given,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    cwd=self.folder,
                    start_new_session=True,
                )
            except OSError as error:
                raise NotDeliveredError(f"the command {name} cannot be run: {error.strerror}") from error
            try:
                code = process.wait(self.seconds)
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise NotDeliveredError(f"the command {name} did not end within {self.seconds:g} s") from None
            if code:
                said.seek(0)
                words = said.read(SAID_BYTES).decode(errors="replace").strip()
                raise NotDeliveredError(f"the command {name} ended with exit {code}" + (f": {words}" if words else ""))
