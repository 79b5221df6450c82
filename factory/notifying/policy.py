"""``policies/notifications.yaml``: who is told what happens."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from factory.core.policy_file import StrictPolicy, load_policy

Kind = Literal["verdict", "approval", "release", "anomaly", "failure"]
Seconds = Annotated[float, Field(gt=0)]


class NotificationPolicy(StrictPolicy):
    """Every key is optional."""

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
        if parts.scheme == "http" and not _is_loopback(parts.hostname):
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


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
