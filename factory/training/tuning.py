"""``factory tune``: time the registered kernels on this machine, at the recipe's shapes.

Measured by the live code in a process of its own (``kernels.contract.tune``). Every implementation that may be chosen is approved code,
so that choosing needs no proposal; the choice is used from the next segment on (``factory.computing.tuned_kernels``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from factory.computing.computing import measured_precision
from factory.computing.tuned_kernels import KERNELS, lookup, path_of
from factory.core import devices
from factory.core.errors import FactoryError
from factory.core.launching import die_with
from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.git.repository import checkout_live, live_commit
from factory.ledger.ledger import Ledger
from factory.training.planning import load_recipe, trunk_parent
from kernels.contract.choice import automatic, section_of
from kernels.contract.files import write_atomically
from kernels.contract.machine import here

SECONDS = 60.0


class TuningError(FactoryError):
    """The kernels of the live code could not be timed."""


def tune_if_new(workspace: Workspace, progress: Progress) -> None:
    """Tune once for a machine, torch and precision that nothing was tuned for; says so when it cannot, and goes on."""
    try:
        text = (_live_code(workspace) / KERNELS).read_text("utf-8")
        automatic_here = automatic(section_of(text, devices.kind()))
        if automatic_here and lookup(workspace, here(), precision_of(workspace)).choice is None:
            tune(workspace, progress)
    except FactoryError as error:
        progress.line(f"  kernels are not tuned: {error}")


def tune(workspace: Workspace, progress: Progress, seconds: float = SECONDS) -> Path:
    """Time every registered implementation that is right here, at the recipe's shapes; returns the file of what was found.

    Raises: TuningError, ConfigError, RepositoryError.
    """
    recipe, precision = load_recipe(workspace), precision_of(workspace)
    code = _live_code(workspace)
    environment = os.environ | {
        "PYTHONPATH": str(code),
        "TORCHINDUCTOR_CACHE_DIR": str(devices.compiled(workspace.root).with_name(f"tuning-{here().name}")),
        # Outside a sandbox a precompiled header lasts; what is compiled with it, nobody else finds again.
        **dict.fromkeys(devices.COMPILER, "1"),
        **devices.environment(),
    }
    progress.line(f"  tuning kernels for {here()}, recipe {recipe.name} in {precision}, {seconds:.0f} s at most")
    with tempfile.TemporaryDirectory() as folder, progress.task("tuning kernels") as task, devices.one():
        given = Path(folder) / "recipe.yaml"
        given.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
        words = [
            "-m",
            "kernels.contract.tune",
            "--recipe",
            str(given),
            "--precision",
            precision,
            "--device",
            devices.kind(),
        ]
        process = subprocess.Popen(
            [sys.executable, *words, "--seconds", str(seconds)],
            cwd=code,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=die_with(os.getpid()),
        )
        assert process.stdout is not None and process.stderr is not None
        said = ""
        try:
            for line in process.stderr:
                if said := line.strip() or said:
                    progress.line(f"    {said}")
                    task.advance(1)
            answer = process.stdout.read()
            code_of = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if code_of:
        raise TuningError(f"the kernels could not be timed (exit {code_of}): {said[:500]}")
    found = json.loads(answer.splitlines()[-1]) | {"recipe": recipe.name, "at": time.time()}
    path = path_of(workspace, found["machine"]["name"], precision)
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps(found, indent=1))
    return path


def precision_of(workspace: Workspace) -> str:
    """The precision that a trunk segment planned now would train in."""
    recipe = load_recipe(workspace)
    last = trunk_parent(Ledger.open(workspace.ledger_url), recipe)
    return str(measured_precision(recipe, last.recipe_json["precision"] if last else "")["precision"])


def _live_code(workspace: Workspace) -> Path:
    return checkout_live(workspace, live_commit(workspace.repository))
