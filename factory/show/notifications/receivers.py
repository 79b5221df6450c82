"""The receivers of notifications, from ``policies/notifications.yaml``. Each runs as a process that reads a notification on standard input."""

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
from factory.core.listening_socket import is_loopback
from factory.core.policy_file import StrictPolicy, load_policy
from kernels.contract.files import encode_finite_json
from kernels.contract.strict import make_known_words_hint

NotificationKind = Literal["verdict", "approval", "release", "anomaly", "failure"]
Seconds = Annotated[float, Field(gt=0)]
SENDING = Path(__file__).with_name("sending.py")
OWN = ("webhook", "command")  # receivers with their own keys in the policy
VARIABLE = re.compile(r"\$(\w+)")
SAID_BYTES = 300
MOST_READ = 1 << 20  # bytes of a receiver's error output, before secrets are removed
SHORTEST_SECRET = 4  # characters; shorter parts of an address are no secrets, and occur in ordinary words


class NotDeliveredError(FactoryError):
    """A receiver did not take a notification. The factory sends it again."""


class NotificationPolicy(StrictPolicy):
    """Every key is optional."""

    receivers: dict[str, str] = {}
    """Addresses of the library apprise, under names that you choose. apprise knows over a hundred services (chat, mail, phones), such as
    'slack://$SLACK_A/$SLACK_B/$SLACK_C' or 'mailtos://me:$MAIL_WORD@example.org'. $NAME is an environment variable of the daemon. A path is a file
    with the address. Keep secrets in one of these two. {}: none."""
    webhook: str = ""
    """Address to which each notification is POSTed as JSON: https, or http to this machine. If $FACTORY_WEBHOOK_SECRET is set, the header
    X-Factory-Signature is 'sha256=' and the HMAC of the body. '': none."""
    command: list[str] = []
    """Words of a command that runs for each notification, without a shell, in the workspace. It reads the notification as JSON on standard input;
    exit code 0 means delivered. []: none."""
    kinds: list[NotificationKind] = ["verdict", "approval", "release", "anomaly", "failure"]
    """Kinds to send: verdicts of the gates, approvals that wait, releases and rollbacks, anomalies and diagnoses, failures (also a daemon
    that waits)."""
    timeout_seconds: Annotated[float, Field(gt=0, le=300)] = 10.0
    """Time limit of one delivery."""
    first_wait_seconds: Seconds = 10.0
    """Wait before a failed delivery is tried again. The wait doubles after each further failure."""
    longest_wait_seconds: Seconds = 600.0
    """Longest such wait."""

    @field_validator("receivers")
    @classmethod
    def _known(cls, receivers: dict[str, str]) -> dict[str, str]:
        for name, address in receivers.items():
            if not re.fullmatch(r"[\w.-]{1,60}", name) or name in OWN:
                raise ValueError(
                    f"{name!r} is not a valid name: use letters, digits, '_', '.' and '-', but not {' or '.join(OWN)}"
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
            raise ValueError(
                "a password in this address is not allowed; $FACTORY_WEBHOOK_SECRET signs each notification"
            )
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise ValueError("http is allowed only to this machine (127.0.0.1, ::1, localhost); use https")
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
        raise ValueError(f"{name}: apprise knows no {scheme}://{make_known_words_hint(scheme, list(known))}")


@dataclass(frozen=True)
class Receiver:
    """A receiver of notifications, which runs as a command.

    ``description`` names it in messages. ``address`` is from the policy; it is empty for a person's command, which gets the notification unchanged.
    """

    description: str
    command_words: tuple[str, ...]
    seconds: float
    folder: Path
    address: str = ""
    extra_fields: dict[str, Any] = field(default_factory=dict)

    def deliver(self, message: dict[str, Any]) -> None:
        """Run the receiver with a notification. Raises: NotDeliveredError, which shows no secret."""
        given, secrets = message, tuple[str, ...]()
        if self.address:
            found = self.address if self.extra_fields else _filled_in(self.address)
            given, secrets = {"url": found, "message": message} | self.extra_fields, _secrets(found, self.address)
        self._run(given, secrets)

    def _run(self, given: dict[str, Any], secrets: tuple[str, ...]) -> None:
        with tempfile.TemporaryFile() as sent, tempfile.TemporaryFile() as said:
            sent.write(encode_finite_json(given).encode() + b"\n")
            sent.seek(0)
            try:
                process = subprocess.Popen(
                    self.command_words, stdin=sent, stdout=subprocess.DEVNULL, stderr=said, cwd=self.folder, start_new_session=True
                )  # fmt: skip
            except OSError as error:
                raise NotDeliveredError(
                    "notifications.not_run",
                    "{receiver} cannot be run: {reason}",
                    receiver=self.description,
                    reason=error.strerror,
                ) from error
            try:
                code = process.wait(self.seconds)
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise NotDeliveredError(
                    "notifications.slow",
                    "{receiver} did not end within {seconds:g} s",
                    receiver=self.description,
                    seconds=self.seconds,
                ) from None
            if code:
                said.seek(max(0, said.seek(0, os.SEEK_END) - MOST_READ))
                words = said.read().decode(errors="replace").strip()
                for secret in secrets:
                    words = words.replace(secret, "***")
                raise NotDeliveredError(
                    "notifications.receiver_failed",
                    "{receiver} failed: {reason}",
                    receiver=self.description,
                    reason=words[-SAID_BYTES:] or f"exit {code}",
                )


def make_receivers(policy: NotificationPolicy, folder: Path) -> dict[str, Receiver]:
    """The policy's receivers, by name."""
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
    """The address with its secrets, from a file or from environment variables. A variable that is only a part of the address is escaped.

    Raises: NotDeliveredError.
    """
    if address.startswith("/"):
        try:
            return Path(address).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise NotDeliveredError(
                "notifications.unread_address", "{file} cannot be read: {reason}", file=address, reason=error
            ) from None

    def value(found: re.Match[str]) -> str:
        if not (word := os.environ.get(found[1], "")):
            raise NotDeliveredError(
                "notifications.no_variable",
                "The environment variable {variable} is not set in the daemon's environment.",
                variable=found[1],
            )
        return word if found[0] == address else quote(word, safe="")

    return VARIABLE.sub(value, address)


def _secrets(url: str, shown: str) -> tuple[str, ...]:
    """The parts of an address that are not in the policy, longest first."""
    parts = {unquote(part) for part in re.split(r"[/:@?&=#]+", url)} | set(re.split(r"[/:@?&=#]+", url))
    hidden = [part for part in parts if len(part) >= SHORTEST_SECRET and part not in shown]
    return tuple(sorted(hidden, key=len, reverse=True))
