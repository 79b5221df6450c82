"""Reads the results of ``factory tune``: one file for each machine class and precision in the workspace's ``tuning/``.

When a segment is planned, the kernels that are ``auto`` in ``kernels.yaml`` come from these files (``factory.computing.compute_settings``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from factory.core.errors import ConfigError
from factory.core.faults import is_machine_fault_unrelated_to_files
from factory.core.workspace import Workspace
from kernels.contract.message import Message

if TYPE_CHECKING:
    from kernels.contract.machine import Machine

KERNELS = "policies/kernels.yaml"


@dataclass(frozen=True)
class TunedKernels:
    """The tuned kernels of a machine and a precision. ``note``: a message if the tuning is missing or does not fit exactly."""

    choice: Mapping[str, str] | None
    source: str  # the file, or ''
    note: str = ""


@contextmanager
def open_live_kernels_file(workspace: Workspace) -> Iterator[tuple[Path, str]]:
    """Yield (a file with the live commit's kernels.yaml, the file's text). Without a git repository, the file is the checkout's own."""
    from factory.git.repository import RepositoryError, get_live_commit, read_file_text

    path = workspace.repository / KERNELS
    try:
        text = read_file_text(workspace.repository, get_live_commit(workspace.repository), KERNELS)
    except RepositoryError as error:
        if is_machine_fault_unrelated_to_files(error):
            raise
        yield path, path.read_text("utf-8")
        return
    with TemporaryDirectory() as folder:
        live = Path(folder) / path.name
        live.write_text(text, "utf-8")
        yield live, text


def get_tuning_path(workspace: Workspace, machine_class: str, precision: str) -> Path:
    """Return the path of the tuning of a machine class and a precision. fp8 uses the file of bf16."""
    from kernels.contract.precision import find_compute_precision

    return workspace.root / "tuning" / f"{machine_class}-{find_compute_precision(precision)}.json"


def find_tuning(
    workspace: Workspace, machine: Machine, precision: str, shape: Mapping[str, int] | None = None
) -> TunedKernels:
    """Return the tuning for this machine. ``shape``: the sizes of the recipe. A tuning for other sizes is used too, with a note.

    Raises: ConfigError naming the file, if the file cannot be read or was made on another class of machine.
    """
    path = get_tuning_path(workspace, machine.name, precision)
    if not path.exists():
        note = Message(
            "computing.not_tuned", "No kernels are tuned for {machine} in {precision}, so the 'auto' kernels of kernels.yaml run untuned. "
            "Run 'factory tune'.", machine=machine.name, precision=precision,
        )  # fmt: skip
        return TunedKernels(None, "", note)
    found = read_tuning(path)
    made = found["machine"]
    if made["name"] != machine.name:
        raise ConfigError(
            "computing.other_machine", "{file} was made on a machine of class {made!r}, but this machine is of class {here!r}. Remove the file.",
            file=path, made=made["name"], here=machine.name,
        )  # fmt: skip
    if made["torch"] != machine.torch:
        note = Message(
            "computing.other_torch", "{file} was made with torch {made}, but this machine has torch {here}. The factory does not use the file. "
            "Run 'factory tune'.", file=path, made=made["torch"], here=machine.torch,
        )  # fmt: skip
        return TunedKernels(None, "", note)
    if shape is None or found["setting"]["shape"] == dict(shape):
        return TunedKernels(found["choice"], str(path))
    note = Message(
        "computing.other_shape",
        "{file} was tuned for the sizes of another recipe. The factory uses the file nevertheless. To measure "
        "again, run 'factory tune'.",
        file=path,
    )  # fmt: skip
    return TunedKernels(found["choice"], str(path), note)


def read_tuning(path: Path) -> dict[str, Any]:
    """Return the content of a tuning file. Raises: ConfigError naming the file."""
    try:
        found = json.loads(path.read_text("utf-8"))
        choice, made = found["choice"], found["machine"]
        whole = all(isinstance(key, str) and isinstance(value, str) for key, value in choice.items())
        if not whole or not isinstance(made["name"], str) or not isinstance(made["torch"], str):
            raise ValueError("its values are of the wrong kind")
        found["setting"]["shape"]["batch"]
        return dict(found)
    except OSError as error:
        raise ConfigError(
            "computing.tuning_unreadable", "{file} cannot be read: {error}", file=path, error=error.strerror
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            "computing.tuning_invalid", "{file} is not a result of 'factory tune' ({error}). Remove the file and run 'factory tune'.",
            file=path, error=error,
        ) from None  # fmt: skip


def describe_tuning(tuning: Mapping[str, Any]) -> list[str]:
    """Return a tuning as lines for a person: the chosen kernels and the measured times."""
    from kernels.contract.machine import Machine

    setting = tuning["setting"]
    lines = [f"{Machine(**tuning['machine'])}: recipe {tuning.get('recipe', '?')} in {setting['precision']}"]
    for op, chosen in tuning["choice"].items():
        tried = [one for one in tuning["timed"] if one["op"] == op]
        times = ", ".join(
            f"{one['implementation']} {one['ratio']:.2f}x" if one["ratio"] else f"{one['implementation']} {one['why']}"
            for one in tried
        )
        lines.append(f"  {op:<22}{chosen}" + (f"   (reference 1x, {times})" if times else ""))
    return lines
