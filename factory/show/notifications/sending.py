"""Sends one notification over the network. It is a process of its own, so that a time limit can end it whatever a server does.

The script imports nothing of this project. Standard input has ``{"url", "message"}``, and ``"webhook": true`` for an address to which the message is
POSTed unchanged. Every other address is one of apprise's. Exit code 0 means delivered; otherwise the last line on standard error gives the reason.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import ipaddress
import json
import os
import sys
from typing import Any
from urllib.parse import urlsplit

SECRET = "FACTORY_WEBHOOK_SECRET"
LOOK = {
    "failure": "failure",
    "anomaly": "warning",
    "release": "success",
}  # apprise's type of a notification, by kind; 'info' for other kinds


def post_json(url: str, message: dict[str, Any]) -> str:
    """POST JSON. A status of 2xx means delivered; redirects are not followed. Returns why the message was not delivered, or ''."""
    body = json.dumps(message).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "factory", "X-Factory-Event": str(message["id"])}
    if secret := os.environ.get(SECRET, ""):
        headers["X-Factory-Signature"] = "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port)
    try:
        connection.request("POST", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), body, headers)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    return "" if 200 <= status < 300 else f"the server answered {status}"


def send_by_apprise(url: str, message: dict[str, Any]) -> str:
    """Send by apprise. Returns why the message was not delivered, or ''."""
    from apprise import Apprise, AppriseAsset, LogCapture

    # a redirect would turn the POST into a GET, and the message would seem delivered
    asset = AppriseAsset(app_id="factory", app_desc="", app_url="", http_redirects=False)
    with LogCapture(level=30, fmt="%(message)s") as log:
        receiver = Apprise.instantiate(url, asset=asset)
        if receiver is None:
            return f"apprise refuses the address: {_last(log.getvalue()) or 'it has none of the known forms'}"
        if is_unencrypted_receiver(receiver):
            return (
                "this address sends without encryption, which is allowed only to this machine; use its encrypted form"
            )
        kinds = message["kinds"]
        done = receiver.notify(
            title=f"{message['workspace']}: {message['title']}",
            body=f"{message['text']}\n(event {message['id']})".lstrip(),
            notify_type=next((LOOK[kind] for kind in LOOK if kind in kinds), "info"),
        )
        return "" if done else _last(log.getvalue()) or "apprise gives no reason"


def is_unencrypted_receiver(receiver: Any) -> bool:
    """Whether a receiver sends without encryption to another machine, so that others could read the message."""
    words = lambda known: (known,) if isinstance(known, str) else known or ()
    plain = receiver.schema in words(receiver.protocol) and receiver.schema not in words(receiver.secure_protocol)
    host = getattr(receiver, "smtp_host", None) or getattr(receiver, "host", None)
    if not plain or not host or getattr(receiver, "secure_mode", "insecure") != "insecure":
        return False
    try:
        return host != "localhost" and not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return True


def _last(text: str) -> str:
    """The last line of apprise's log that shows no address."""
    return next((line for line in reversed(text.splitlines()) if line.strip() and "://" not in line), "")


if __name__ == "__main__":
    given = json.load(sys.stdin)
    sys.exit((post_json if given.get("webhook") else send_by_apprise)(given["url"], given["message"]) or 0)
