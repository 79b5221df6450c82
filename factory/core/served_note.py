"""A note with the address of this workspace's ``factory serve``. Other programs on this machine read the note to find the server."""

from __future__ import annotations

import contextlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator

from factory.core.errors import InputError
from factory.core.workspace import Workspace
from kernels.contract.files import write_atomically
from kernels.contract.message import Message

NOTE = "cache/serve.json"
SECONDS = 10.0
LONGEST = 1 << 16  # bytes of the server's answer that are read


@contextlib.contextmanager
def publish_served_address(workspace: Workspace, url: str) -> Iterator[None]:
    """Write the note, and remove it when the block ends."""
    path = workspace.root / NOTE
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps({"url": url, "pid": os.getpid()}))
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            if json.loads(path.read_text()).get("pid") == os.getpid():  # else the note is another server's
                path.unlink()


def find_served_champion(workspace: Workspace, key: str) -> tuple[str, str, int]:
    """Return the server's base URL, the model's name and the number of the release that the server serves.

    Raises: InputError when no server runs, the server does not answer, or the server has no release yet.
    """
    start = Message(
        "served_note.start_a_server",
        "Start 'factory serve --workspace {workspace}' and wait until it serves a release",
        workspace=workspace.root,
    )
    try:
        url = str(json.loads((workspace.root / NOTE).read_text())["url"])
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError("served_note.no_server", "No server serves the champion. {start}", start=start) from None
    asked = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=SECONDS) as answer:
            models = json.loads(answer.read(LONGEST))["data"]
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise InputError(
                "served_note.key_refused",
                "The server at {url} refused the key. Set FACTORY_SERVE_KEY to the server's key",
                url=url,
            ) from None
        raise InputError(
            "served_note.error_status",
            "The server at {url} answered with HTTP status {status}",
            url=url,
            status=error.code,
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            "served_note.no_answer",
            "The server at {url} does not answer ({why}). {start}",
            url=url,
            why=str(error),
            start=start,
        ) from None
    if not models or not isinstance(models[0].get("release"), int):
        raise InputError(
            "served_note.no_release", "The server at {url} has no release yet. {start}", url=url, start=start
        )
    return url, str(models[0].get("id")), models[0]["release"]
