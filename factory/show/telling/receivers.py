"""``policies/notifications.yaml``: who is told what happens. A receiver is a process that gets a message on standard input, within a time limit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote, unquote, urlsplit

from pydantic import Field, field_validator

from factory.core.errors import FactoryError
from factory.core.listening import is_loopback
from factory.core.policy_file import StrictPolicy, load_policy
from kernels.contract.files import finite_json
from trainer.contract.errors import nearest

Kind = Literal["verdict", "approval", "release", "anomaly", "failure"]
Seconds = Annotated[float, Field(gt=0)]
SENDING = Path(__file__).with_name("sending.py")
OWN = ("webhook", "command")  # receivers that have keys of their own
VARIABLE = re.compile(r"\$(\w+)")
SAID_BYTES = 300
MOST_READ = 1 << 20  # of what a receiver says, before its secrets are taken out
SHORTEST_SECRET = 4  # shorter parts of an address hide nothing, and occur in any sentence


class NotDeliveredError(FactoryError):
    """A receiver did not take a message: it gets it again."""


class NotificationPolicy(StrictPolicy):
    """Every key is optional."""

    receivers: dict[str, str] = {}
    """By a name of your own, addresses of apprise (chat, mail, phones, …: its documentation lists over a hundred), such as
    'slack://$SLACK_A/$SLACK_B/$SLACK_C' or 'mailtos://me:$MAIL_WORD@example.org'. $NAME is that environment variable, of the daemon; a path is a file
    that holds the address. A secret belongs into one of the two. {}: none."""
    webhook: str = ""
    """Address that each message is POSTed to as JSON: https, or http to this machine. $FACTORY_WEBHOOK_SECRET, where it is set, signs it:
    the header X-Factory-Signature is 'sha256=' and the HMAC of the body. '': none."""
    command: list[str] = []
    """Words of a command that is run for each message, without a shell and in the workspace, with the message as JSON on its standard input; exit
    0 means delivered. []: none."""
    kinds: list[Kind] = ["verdict", "approval", "release", "anomaly", "failure"]
    """What is told: verdicts of the gates, approvals that wait, releases and rollbacks, anomalies and diagnoses, failures (also a daemon that
    waits)."""
    timeout_seconds: Annotated[float, Field(gt=0, le=300)] = 10.0
    """Of one delivery."""
    first_wait_seconds: Seconds = 10.0
    """Before what failed is tried again; twice as long after each further failure."""
    longest_wait_seconds: Seconds = 600.0
    """What such a wait grows to."""

    @field_validator("receivers")
    @classmethod
    def _known(cls, receivers: dict[str, str]) -> dict[str, str]:
        for name, address in receivers.items():
            if not re.fullmatch(r"[\w.-]{1,60}", name) or name in OWN:
                raise ValueError(
                    f"{name!r} is no name: letters, digits, '_', '.' and '-' are, but not {' or '.join(OWN)}"
                )
            scheme, found, _ = address.partition("://")
            if not found and not VARIABLE.fullmatch(address) and not address.startswith("/"):
                raise ValueError(
                    f"{name}: expected an address of apprise (scheme://…), $NAME, or the path of a file from '/' on"
                )
            if found:
                _check_scheme(name, scheme)
        return receivers

    @field_validator("webhook")
    @classmethod
    def _reachable_safely(cls, webhook: str) -> str:
        if not webhook:
            return webhook
        parts = urlsplit(webhook)
        if parts.scheme not in ("https", "http") or not parts.hostname:
            raise ValueError("expected an https:// address, or http:// to this machine")
        if parts.username or parts.password:
            raise ValueError("an address here holds no password: $FACTORY_WEBHOOK_SECRET signs each message")
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise ValueError("http is for this machine alone (127.0.0.1, ::1, localhost): use https")
        if any(ord(letter) <= 32 or ord(letter) > 126 for letter in webhook) or parts.port == 0:
            raise ValueError("expected a plain address, with other characters as %XX")
        return webhook

    @field_validator("command")
    @classmethod
    def _words(cls, command: list[str]) -> list[str]:
        if command and (not command[0] or any("\0" in word for word in command)):
            raise ValueError("expected the words of a command, the program first")
        return command

    @classmethod
    def load(cls, path: Path) -> NotificationPolicy:
        """Raises: ConfigError naming the file and the key."""
        return load_policy(cls, path)


def _check_scheme(name: str, scheme: str) -> None:
    from apprise.manager_plugins import NotificationManager

    known = NotificationManager().schemas()
    if scheme.lower() not in known:
        raise ValueError(f"{name}: apprise knows no {scheme}://{nearest(scheme, list(known))}")


@dataclass(frozen=True)
class Receiver:
    """``what``: it, in words. ``address``: as the policy has it; '' for a command, which gets the message as it is."""

    what: str
    words: tuple[str, ...]
    seconds: float
    folder: Path
    address: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    def deliver(self, message: dict[str, Any]) -> None:
        """Raises: NotDeliveredError, which shows no secret."""
        given, secrets = message, tuple[str, ...]()
        if self.address:
            found = self.address if self.more else _filled_in(self.address)
            given, secrets = {"url": found, "message": message} | self.more, _secrets(found, self.address)
        self._run(given, secrets)

    def _run(self, given: dict[str, Any], secrets: tuple[str, ...]) -> None:
        with tempfile.TemporaryFile() as sent, tempfile.TemporaryFile() as said:
            sent.write(finite_json(given).encode() + b"\n")
            sent.seek(0)
            try:
                process = subprocess.Popen(
                    self.words, stdin=sent, stdout=subprocess.DEVNULL, stderr=said, cwd=self.folder, start_new_session=True
                )  # fmt: skip
            except OSError as error:
                raise NotDeliveredError(f"{self.what} cannot be run: {error.strerror}") from error
            try:
                code = process.wait(self.seconds)
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise NotDeliveredError(f"{self.what} did not end within {self.seconds:g} s") from None
            if code:
                said.seek(max(0, said.seek(0, os.SEEK_END) - MOST_READ))
                words = said.read().decode(errors="replace").strip()
                for secret in secrets:
                    words = words.replace(secret, "***")
                raise NotDeliveredError(f"{self.what} failed: {words[-SAID_BYTES:] or f'exit {code}'}")


def receivers(policy: NotificationPolicy, folder: Path) -> dict[str, Receiver]:
    """By name, those that the policy has."""
    send = (sys.executable, "-I", str(SENDING))
    seconds = policy.timeout_seconds
    found = {name: Receiver(name, send, seconds, folder, url) for name, url in policy.receivers.items()}
    if policy.webhook:
        what = f"the webhook at {urlsplit(policy.webhook).hostname}"
        found["webhook"] = Receiver(what, send, seconds, folder, policy.webhook, {"webhook": True})
    if policy.command:
        found["command"] = Receiver(f"the command {policy.command[0]}", tuple(policy.command), seconds, folder)
    return found


def _filled_in(address: str) -> str:
    """The address with its secrets: a file's, or environment variables', each escaped unless it is all of it. Raises: NotDeliveredError."""
    if address.startswith("/"):
        try:
            return Path(address).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise NotDeliveredError(f"{address} cannot be read: {error}") from None

    def value(found: re.Match[str]) -> str:
        if not (word := os.environ.get(found[1], "")):
            raise NotDeliveredError(f"the environment variable {found[1]} is not set where the daemon was started")
        return word if found[0] == address else quote(word, safe="")

    return VARIABLE.sub(value, address)


def _secrets(url: str, shown: str) -> tuple[str, ...]:
    """The parts of an address that the policy does not show, longest first."""
    parts = {unquote(part) for part in re.split(r"[/:@?&=#]+", url)} | set(re.split(r"[/:@?&=#]+", url))
    hidden = [part for part in parts if len(part) >= SHORTEST_SECRET and part not in shown]
    return tuple(sorted(hidden, key=len, reverse=True))
