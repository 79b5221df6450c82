"""``factory demo``: the whole factory once, on real text, through the same code as the daemon, in the minutes given.

Only the arrival of the shards is scripted, and that the code loop begins after them: the daemon's duties decide what happens, and every number
of the last screen is read from the ledger. The size of the model, the steps and how much is measured follow from measurements
of this machine (``demo_size``). After a kill the same command goes on where it was.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import yaml

from factory.backups.backups import make_ledger
from factory.computing.tuned_kernels import KERNELS
from factory.core import devices
from factory.core.console import Terminal
from factory.core.errors import FactoryError, InputError, WorkspaceError
from factory.core.launching import run_python
from factory.core.workspace import MODEL_LOOP, Config, Workspace, code_root
from factory.demo import demo_size
from factory.demo.demo_size import LADDER, DemoShape, Seen, Size
from factory.demo.summary import summary
from factory.duties.runner import work
from factory.git.repository import fork, live_commit
from factory.ingest.inbox import arrived, ingest_arrived
from factory.ledger.ledger import sa, shards
from factory.ledger.plant import Plant
from factory.ledger.status import snapshot
from kernels.contract.files import write_atomically

MARK = ".demo"  # --fresh removes only a folder with this file
BAD_SHARD = "surprise-00.jsonl"
MEASURING = "measuring"  # in place of a commit: the demo's model before there is one
CODE = "code"  # in the workspace: the demo's own repository, so that yours gets no branches
RECIPE = "policies/recipes/demo.yaml"
SMALL_CORPUS = 4.0  # minutes below which half of the library is the corpus


def run_demo(where: Path, terminal: Terminal, *, minutes: float = demo_size.SIX, fresh: bool = False) -> None:
    """Raises: InputError for minutes out of range; WorkspaceError when the folder has files that no demo made."""
    began = time.monotonic()
    try:
        demo_size.checked(minutes)
    except ValueError as error:
        raise InputError(str(error)) from None
    root = where.expanduser().resolve()
    if root.exists() and any(root.iterdir()):
        if not (root / MARK).exists():
            raise WorkspaceError(f"{root} has files that no demo made: name another folder with --workspace")
        if fresh:
            if (root / "factory.yaml").exists():
                with Workspace.open(root).lock(MODEL_LOOP):  # no demo may be running in it
                    pass
            shutil.rmtree(root)
    terminal.heading("1  A workspace, and a corpus: the standard library of this Python")
    root.mkdir(parents=True, exist_ok=True)
    (root / MARK).touch()
    workspace = Workspace.create(root, Config(repository=CODE))
    _write_data_policy(workspace)
    ledger = make_ledger(workspace)
    with workspace.lock(MODEL_LOOP):
        corpus = _corpus(workspace, terminal, minutes)
        first = [path for path in corpus if path.stem.endswith("-00")]
        terminal.heading("2  First shards arrive: ingest")
        _arrive(Plant(workspace, ledger), first)
        ingesting = time.monotonic()
        for path in arrived(Plant(workspace, ledger), settle=0.0):
            ingest_arrived(Plant(workspace, ledger, terminal), path)
        if not workspace.repository.exists():
            terminal.heading("3  How fast is this machine? The model and its steps are chosen to fit")
            _fit(workspace, terminal, minutes, began, time.monotonic() - ingesting)
        terminal.heading("4  Train, evaluate, gate, release")
        work(Plant(workspace, ledger, terminal), settle=0.0)
        terminal.heading(
            "5  New shards arrive, one of them bad: training goes on from the trunk, candidate 2 meets the champion"
        )
        _arrive(
            Plant(workspace, ledger),
            [path for path in corpus if path not in first] + [_bad_shard(Plant(workspace, ledger))],
        )
        work(Plant(workspace, ledger, terminal), settle=0.0)
        terminal.heading(
            "6  Nothing else is to be done: the factory improves itself. It times every line of the training step, proposes a patch, judges it"
        )
        failure: FactoryError | None = None
        try:
            _improve_when_idle(workspace)
            work(Plant(workspace, ledger, terminal), settle=0.0)
        except FactoryError as error:  # for example without a sandbox; the earlier results stay
            failure = error
            terminal.line(f"  the code loop could not run: {error}")
    terminal.heading("7  What happened")
    for line in summary(workspace, snapshot(workspace), time.monotonic() - began):
        terminal.line(line)
    if failure:
        raise failure


def _fit(workspace: Workspace, terminal: Terminal, minutes: float, began: float, ingest: float) -> None:
    """Measure, choose sizes, and write them: the code's recipe and kernels, the workspace's policies."""
    from factory.computing.computing import describe_precision, measured_precision
    from trainer.contract.recipe import Recipe

    raw = _read_recipe((code_root() / RECIPE).read_text("utf-8"))
    found = measured_precision(Recipe.parse(raw))
    terminal.line(f"  {describe_precision(found)}")
    shape = demo_size.first_guess(minutes, _predicted(raw, found))
    for attempt in range(3):
        measured = _step_rate(workspace, terminal, shape.recipe(raw) | {"precision": found["precision"]}, str(shape))
        terminal.line(f"  {shape}: {measured['step_s'] * 1e3:,.0f} ms a step, {measured['tokens_per_s']:,.0f} tokens/s")
        better = demo_size.next_guess(minutes, shape, measured["step_s"])
        climbs = LADDER.index(better) > LADDER.index(shape)
        if better == shape or attempt == 2 or (climbs and attempt == 1):  # the chosen shape must have been measured
            break
        shape = better
    seen = Seen(time.monotonic() - began, ingest, measured["start_s"], measured["step_s"])
    size = demo_size.plan(minutes, seen)
    parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in size.seconds.items())
    terminal.line(
        f"  chosen for {minutes:g} minutes: {shape}; {size.first} + {size.anneal} steps for the first candidate, "
        f"{size.later} + {size.anneal} for the second"
    )
    terminal.line(f"  expected time, in seconds: {parts}")
    if size.over > 30:
        terminal.line(
            f"  on this machine, with its present load, that takes about {sum(size.seconds.values()) / 60:.1f} minutes; "
            "with fewer steps the model would learn too little"
        )
    _write_policies(workspace, size)
    edits = {KERNELS: plain_kernels, RECIPE: lambda text: _recipe_text(text, shape, size)}
    title = "The demo begins with plain kernels, and a model that fits this machine"
    fork(code_root(), workspace.repository, edits, title)
    measured_with = devices.compiled(workspace.root, MEASURING)
    if measured_with.is_dir():  # the factory's own checkout compiled it: training may go on with it
        own = devices.compiled(workspace.root, live_commit(workspace.repository))
        shutil.rmtree(own, ignore_errors=True)
        measured_with.rename(own)


def _read_recipe(text: str) -> dict[str, Any]:
    """The keys of a recipe's file, without defaults."""
    from kernels.contract.strict_yaml import read_yaml
    from trainer.contract.errors import RecipeError

    found = read_yaml(text, RECIPE, RecipeError)
    assert isinstance(found, dict), RECIPE
    return found


def _predicted(raw: dict[str, Any], found: dict[str, Any]) -> dict[DemoShape, float]:
    """Seconds of the matrix products, attention and loss head of a step of each shape, by the probe's rates."""
    import torch

    from trainer.contract.plan.precision import DTYPES, parts
    from trainer.contract.recipe import Recipe

    rates = found["probe"]["rates"][found["precision"]]
    threads = torch.get_num_threads() if found["probe"]["device"] == "cpu" else 1
    predicted = {}
    for shape in LADDER:
        made = parts(Recipe.parse(shape.recipe(raw)), torch.device("cpu"), DTYPES[found["precision"]])
        predicted[shape] = sum(part.flops / rates[name] for name, part in made.items()) / threads
    return predicted


def _step_rate(workspace: Workspace, terminal: Terminal, recipe: dict[str, Any], title: str) -> dict[str, float]:
    """The rate of the recipe's steps, from a process of its own; training reuses its compiled code. ``start_s``: the start of
    such a program, twice its imports.

    Raises: FactoryError with the last line of its output.
    """
    folder = workspace.root / "cache"
    folder.mkdir(exist_ok=True)
    given, kernels = folder / "demo-recipe.yaml", folder / "demo-kernels.yaml"
    given.write_text(yaml.safe_dump(recipe))
    kernels.write_text(plain_kernels((code_root() / KERNELS).read_text("utf-8")))
    words = ["-m", "agents.line_profiler.step_rate", "--recipe", str(given), "--kernels", str(kernels)]
    cache = str(devices.compiled(workspace.root, MEASURING) / "inductor")
    began = time.monotonic()
    with terminal.task(f"timing steps of {title} (the first compiles)"):
        done = run_python(code_root(), *words, TORCHINDUCTOR_CACHE_DIR=cache)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise FactoryError(f"a step of the demo's recipe could not be timed: {said}")
    found = dict(json.loads(done.stdout.splitlines()[-1]))
    return found | {"start_s": 2 * (time.monotonic() - began - found["whole_s"])}


def _recipe_text(text: str, shape: DemoShape, size: Size) -> str:
    raw = shape.recipe(_read_recipe(text))
    raw["schedule"] |= {"trunk_steps": {"first": size.first, "later": size.later}, "anneal_steps": size.anneal}
    return "# Sized by 'factory demo' for this machine.\n" + yaml.safe_dump(raw, sort_keys=False)


def _write_data_policy(workspace: Workspace) -> None:
    """The shipped one, with a module's code, docs and chats held out together: they quote one another."""
    from agents.core.yaml_edit import set_value

    path = workspace.root / "policies" / "data.yaml"
    if not path.exists():
        text = (code_root() / "policies" / "data.yaml").read_text("utf-8")
        for domain in ("code", "docs", "chat"):
            text = set_value(text, ("domains", domain, "group"), "source")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _write_policies(workspace: Workspace, size: Size) -> None:
    """Copies of the policies with as much measuring as there is time for, and the shipped thresholds."""
    own = workspace.root / "policies"
    changes: dict[str, dict[str, Any]] = {
        "evals.yaml": size.evals,
        "agents.yaml": {
            "measure_seconds": size.measure_seconds,
            "improve": {"when": "off", "agents": ["search"], "per_day": {"device_seconds": size.improve_seconds}},
        },
        "gates/patch.yaml": {"training": size.patch},
    }
    for name, values in changes.items():
        raw = yaml.safe_load((code_root() / "policies" / name).read_text("utf-8"))
        for key, value in values.items():
            raw[key] = raw.get(key, {}) | value if isinstance(value, dict) else value
        path = own / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "# The shipped policy, with as much measuring as 'factory demo' has time for.\n"
            + yaml.safe_dump(raw, sort_keys=False)
        )


def plain_kernels(policy: str) -> str:
    """kernels.yaml with the plain expressions in place of every choice: something is left to find."""
    from agents.core.yaml_edit import set_value
    from kernels.contract.choice import PLAIN

    for device, choice in yaml.safe_load(policy).items():
        for op in choice if isinstance(choice, dict) else ():
            policy = set_value(policy, (device, op), PLAIN.get(op, "reference"))
    return policy


def _corpus(workspace: Workspace, terminal: Terminal, minutes: float) -> list[Path]:
    from factory.corpus import write_corpus

    folder, aside = workspace.root / "corpus", workspace.root / "corpus.part"
    if not folder.exists():
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        write_corpus(aside, terminal, 1.0 if minutes >= SMALL_CORPUS else 0.5)
        os.rename(aside, folder)
    found = sorted(path for path in folder.glob("*.jsonl") if path.name != BAD_SHARD)
    if not found:
        raise InputError(f"{folder} has no shards: run 'factory demo --fresh'")
    terminal.line("  " + ", ".join(f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in found))
    return found


def _bad_shard(plant: Plant) -> Path:
    """Written once, after the first ingest, because it has copies of ingested and of held-out documents."""
    from factory.corpus import write_bad_shard

    path = plant.workspace.root / "corpus" / BAD_SHARD
    if not path.exists():
        write_bad_shard(path, plant)
    return path


def _arrive(plant: Plant, files: list[Path]) -> None:
    """Copy shards into the inbox, but not those that are ingested already."""
    from trainer.contract.data.token_shard import file_sha256

    known = {row["sha256"] for row in plant.ledger.rows(sa.select(shards.c.sha256))}
    for path in files:
        if file_sha256(path) not in known:
            aside = plant.workspace.inbox / f"{path.name}.part"
            shutil.copyfile(path, aside)
            os.replace(aside, plant.workspace.inbox / path.name)


def _improve_when_idle(workspace: Workspace) -> None:
    """From now on the daemon improves the factory whenever it has nothing else to do, and so does every 'factory run' here."""
    from agents.core.yaml_edit import set_value

    path = workspace.root / "policies" / "agents.yaml"
    write_atomically(path, set_value(path.read_text("utf-8"), ("improve", "when"), "when-idle"))
