"""Where this workspace's ``factory serve`` listens, so that others of this machine find it: a note that lasts as long as its process."""

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

NOTE = "cache/serve.json"
SECONDS = 10.0
LONGEST = 1 << 16  # bytes of an answer


@contextlib.contextmanager
def served_at(workspace: Workspace, url: str) -> Iterator[None]:
    """Leave the note while the block runs."""
    path = workspace.root / NOTE
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps({"url": url, "pid": os.getpid()}))
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            if json.loads(path.read_text()).get("pid") == os.getpid():  # else another one took its place
                path.unlink()


def find_served(workspace: Workspace, key: str) -> tuple[str, str, int]:
    """(base URL, name of the model there, release) of the champion that is served now. Raises: InputError when none is, or it does not answer."""
    start = f"start 'factory serve --workspace {workspace.root}' first, and wait until it serves a release"
    try:
        url = str(json.loads((workspace.root / NOTE).read_text())["url"])
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"nothing serves the champion: {start}") from None
    asked = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=SECONDS) as answer:
            models = json.loads(answer.read(LONGEST))["data"]
    except urllib.error.HTTPError as error:
        why = "set FACTORY_SERVE_KEY to its key" if error.code == 401 else f"it answered {error.code}"
        raise InputError(f"the champion at {url} cannot be asked: {why}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"the champion at {url} does not answer ({error}): {start}") from None
    if not models or not isinstance(models[0].get("release"), int):
        raise InputError(f"{url} serves no release yet: {start}")
    return url, str(models[0].get("id")), models[0]["release"]
