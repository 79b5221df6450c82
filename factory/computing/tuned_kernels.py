"""What ``factory tune`` found, a file for each machine class and precision in the workspace's ``tuning/``.

What ``kernels.yaml`` leaves to ``auto`` is looked up here when a segment is planned (``factory.computing.computing``).
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
from factory.core.faults import is_of_no_file
from factory.core.workspace import Workspace

if TYPE_CHECKING:
    from kernels.contract.machine import Machine

KERNELS = "policies/kernels.yaml"


@dataclass(frozen=True)
class Tuned:
    """The tuned kernels of a machine and a precision. ``note``: one line for a person, where they are not exactly this machine's or recipe's."""

    choice: Mapping[str, str] | None
    source: str  # the file, or ''
    note: str = ""


@contextmanager
def live_kernels(workspace: Workspace) -> Iterator[tuple[Path, str]]:
    """(a file with ``kernels.yaml`` as the live commit holds it, which is what trains; its text). Where the code is in no repository, its own."""
    from factory.git.repository import RepositoryError, file_text, live_commit

    path = workspace.repository / KERNELS
    try:
        text = file_text(workspace.repository, live_commit(workspace.repository), KERNELS)
    except RepositoryError as error:
        if is_of_no_file(error):
            raise
        yield path, path.read_text("utf-8")
        return
    with TemporaryDirectory() as folder:
        live = Path(folder) / path.name
        live.write_text(text, "utf-8")
        yield live, text


def path_of(workspace: Workspace, machine_class: str, precision: str) -> Path:
    """fp8's kernels are those of bf16."""
    from kernels.contract.precision import of_values

    return workspace.root / "tuning" / f"{machine_class}-{of_values(precision)}.json"


def lookup(workspace: Workspace, machine: Machine, precision: str, shape: Mapping[str, int] | None = None) -> Tuned:
    """The tuning for this machine. ``shape``: the sizes that are trained; of another recipe, it is used and said.

    Raises: ConfigError naming the file, when it cannot be read or was made on another class of machine.
    """
    path = path_of(workspace, machine.name, precision)
    if not path.exists():
        note = f"no kernels are tuned for {machine.name} in {precision}: what kernels.yaml leaves to 'auto' runs untuned; run 'factory tune'"
        return Tuned(None, "", note)
    found = read(path)
    made = found["machine"]
    if made["name"] != machine.name:
        raise ConfigError(
            f"{path} was made on a machine of class {made['name']!r}, this is {machine.name!r}: remove it"
        )
    if made["torch"] != machine.torch:
        note = f"{path} was made with torch {made['torch']}, this is torch {machine.torch}: it is not used; run 'factory tune'"
        return Tuned(None, "", note)
    note = ""
    if shape is not None and found["setting"]["shape"] != dict(shape):
        note = f"{path} was made at the sizes of another recipe: it is used, and 'factory tune' measures again"
    return Tuned(found["choice"], str(path), note)


def read(path: Path) -> dict[str, Any]:
    """Raises: ConfigError naming the file."""
    try:
        found = json.loads(path.read_text("utf-8"))
        choice, made = found["choice"], found["machine"]
        whole = all(isinstance(key, str) and isinstance(value, str) for key, value in choice.items())
        if not whole or not isinstance(made["name"], str) or not isinstance(made["torch"], str):
            raise ValueError("its values are of the wrong kind")
        found["setting"]["shape"]["batch"]
        return dict(found)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a result of 'factory tune' ({error}): remove it, and run 'factory tune'"
        ) from None


def describe(tuning: Mapping[str, Any]) -> list[str]:
    """A tuning as lines for a person: what was chosen, and the times."""
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
