"""``factory tune`` times the registered kernels on this machine, at the recipe's shapes.

The live code measures in a process of its own (``kernels.contract.tune``). Every implementation that it may choose is approved code, so
a choice needs no proposal. The next segment uses the choice (``factory.computing.tuned_kernels``).
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import yaml

from factory.computing.compute_settings import measure_precision
from factory.computing.tuned_kernels import KERNELS, find_tuning, get_tuning_path
from factory.core import devices
from factory.core.errors import FactoryError
from factory.core.progress import Progress
from factory.core.untrusted_trainer_files import parse_json_object
from factory.core.workspace import Workspace
from factory.git.repository import checkout_live_code, get_live_commit
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.runs.live_code import LiveCode
from factory.training.planning import find_trunk_parent, load_recipe
from kernels.contract.choice import list_auto_ops, read_device_section
from kernels.contract.files import write_atomically
from kernels.contract.machine import describe_this_machine
from kernels.contract.message import Message
from kernels.contract.precision import find_compute_precision

SECONDS = 60.0


class TuningError(FactoryError):
    """The kernels of the live code could not be timed."""


def tune_kernels_if_untuned(workspace: Workspace, progress: Progress) -> None:
    """Tune the kernels if there is no tuning for this machine, torch and precision. A failure is reported as a line of progress, not raised."""
    try:
        text = (_live_code(workspace) / KERNELS).read_text("utf-8")
        automatic_here = list_auto_ops(read_device_section(text, devices.get_device_kind()))
        if (
            automatic_here
            and find_tuning(workspace, describe_this_machine(), choose_next_trunk_precision(workspace)).choice is None
        ):
            tune_kernels(workspace, progress)
    except FactoryError as error:
        progress.line(Message("training.not_tuned", "  The kernels are not tuned: {error}", error=error))


def tune_kernels(workspace: Workspace, progress: Progress, seconds: float = SECONDS) -> Path:
    """Time every registered implementation that computes correctly here, at the recipe's shapes; returns the file with the result.

    Raises: TuningError, ConfigError, RepositoryError.
    """
    recipe, precision = load_recipe(workspace), choose_next_trunk_precision(workspace)
    code = LiveCode.check_out_commit(
        Plant(workspace, Ledger.open(workspace.ledger_url, workspace.root), progress),
        get_live_commit(workspace.repository),
    )
    # Many kernels are compiled in one process, so a precompiled header saves time. No other process uses these builds.
    code = replace(code, cache=workspace.root / "cache" / f"tuning-{code.folder.name}-{describe_this_machine().name}")
    header = {devices.PRECOMPILE_HEADERS: "1"}

    def on_line(line: str) -> None:
        if line.strip():
            progress.line(f"    {line.strip()}")
            task.advance(1)

    progress.line(
        Message(
            "training.tuning",
            "  Tuning the kernels for {machine}, recipe {recipe} in {precision}, for at most {seconds:.0f} s.",
            machine=str(describe_this_machine()),
            recipe=recipe.name,
            precision=precision,
            seconds=seconds,
        )  # fmt: skip
    )
    with tempfile.TemporaryDirectory() as folder, progress.task("tuning kernels") as task, devices.hold_device():
        given = Path(folder) / "recipe.yaml"
        given.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
        arguments = ["-m", "kernels.contract.tune", "--recipe", str(given), "--precision", precision]
        arguments += ["--device", devices.get_device_kind(), "--seconds", str(seconds)]
        done = code.run_python(*arguments, readonly=[given], on_line=on_line, environment=header)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [""])[-1][:500]
        raise TuningError(
            "training.tuning_failed",
            "The process that times the kernels ended with exit code {code}. The last line of its error output: {why}",
            code=done.returncode,
            why=why,
        )
    found = parse_json_object(done.stdout[done.stdout.rstrip().rfind("\n") + 1 :]) | {
        "recipe": recipe.name,
        "at": time.time(),
    }
    path = get_tuning_path(workspace, found["machine"]["name"], precision)
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps(found, indent=1))
    return path


def choose_next_trunk_precision(workspace: Workspace) -> str:
    """The precision in which the kernels of the next trunk segment will compute."""
    recipe = load_recipe(workspace)
    last = find_trunk_parent(Ledger.open(workspace.ledger_url, workspace.root), recipe)
    return find_compute_precision(
        measure_precision(recipe, last.recipe_json["precision"] if last and last.has_steps else "")["precision"]
    )


def _live_code(workspace: Workspace) -> Path:
    return checkout_live_code(workspace, get_live_commit(workspace.repository))
