"""``factory demo``: the whole factory once, on real text, through the same code paths as the daemon, in the minutes it is given.

Nothing here is scripted but the arrival of the shards: what happens to them is the reconcile loop's and the code loop's business, and
every number of the last screen is read back from the ledger. How large the model is, how long it trains and how much is measured
follows from what this machine shows (``demo_size``). Killed half-way, the same command goes on where it was.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from factory import daemon
from factory.computing.tuned_kernels import KERNELS
from factory.core import devices
from factory.core.console import Terminal
from factory.core.errors import FactoryError, InputError, WorkspaceError
from factory.core.launching import die_with
from factory.core.workspace import Config, Workspace, code_root
from factory.demo import demo_size
from factory.demo.demo_size import LADDER, Seen, Shape, Size
from factory.demo.summary import summary
from factory.git.repository import fork
from factory.ingest.inbox import arrived, ingest_arrived
from factory.ledger.ledger import Ledger, proposals, sa, shards
from factory.ledger.status import snapshot

MARK = ".demo"  # only a folder with this file in it may be thrown away by --fresh
BAD_SHARD = "surprise-00.jsonl"
CODE = "code"  # in the workspace: a repository of the demo's own, so that yours gets no branches
RECIPE = "policies/recipes/demo.yaml"
SMALL_CORPUS = 4.0  # minutes below which half of the library is the corpus


def run_demo(where: Path, terminal: Terminal, *, minutes: float = demo_size.SIX, fresh: bool = False) -> None:
    """Raises: InputError for minutes that it cannot keep; WorkspaceError when the folder holds a workspace that no demo made."""
    began = time.monotonic()
    try:
        demo_size.checked(minutes)
    except ValueError as error:
        raise InputError(str(error)) from None
    root = where.expanduser().resolve()
    if root.exists() and any(root.iterdir()):
        if not (root / MARK).exists():
            raise WorkspaceError(f"{root} holds something that no demo made: name another folder with --workspace")
        if fresh:
            if (root / "factory.yaml").exists():
                with Workspace.open(root).lock(daemon.LOCK):  # not under a demo that is running
                    pass
            shutil.rmtree(root)
    terminal.heading("1  A workspace, and a corpus: the standard library of this Python")
    root.mkdir(parents=True, exist_ok=True)
    (root / MARK).touch()
    workspace = Workspace.create(root, Config(repository=CODE))
    ledger = Ledger.create(workspace.ledger_url)
    with workspace.lock(daemon.LOCK):
        corpus = _corpus(workspace, terminal, minutes)
        first = [path for path in corpus if path.stem.endswith("-00")]
        terminal.heading("2  First shards arrive: ingest")
        _arrive(workspace, ledger, first)
        ingesting = time.monotonic()
        for path in arrived(workspace, settle=0.0):
            ingest_arrived(workspace, ledger, path, terminal)
        if not workspace.repository.exists():
            terminal.heading("3  How fast is this machine? The model and its steps are chosen to fit")
            _fit(workspace, terminal, minutes, began, time.monotonic() - ingesting)
        terminal.heading("4  Train, evaluate, gate, release")
        daemon.reconcile(workspace, ledger, terminal, settle=0.0)
        terminal.heading(
            "5  New shards arrive, one of them bad: training goes on from the trunk, candidate 2 meets the champion"
        )
        _arrive(workspace, ledger, [path for path in corpus if path not in first] + [_bad_shard(workspace, ledger)])
        daemon.reconcile(workspace, ledger, terminal, settle=0.0)
    terminal.heading("6  The code loop: time every line of the training step, propose one patch, measure it, judge it")
    failure: FactoryError | None = None
    try:
        _code_loop(workspace, ledger, terminal)
    except FactoryError as error:  # no sandbox here, say: all that came before stands
        failure = error
        terminal.line(f"  the code loop could not run: {error}")
    terminal.heading("7  What happened")
    for line in summary(workspace, snapshot(workspace), time.monotonic() - began):
        terminal.line(line)
    if failure:
        raise failure


def _fit(workspace: Workspace, terminal: Terminal, minutes: float, began: float, ingest: float) -> None:
    """Measure, choose, and write what was chosen: the code's recipe and kernels, the workspace's policies. Says why."""
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
        if better == shape or attempt == 2 or (climbs and attempt == 1):  # what is taken was measured
            break
        shape = better
    seen = Seen(time.monotonic() - began, ingest, measured["start_s"], measured["step_s"])
    size = demo_size.plan(minutes, seen)
    parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in size.seconds.items())
    terminal.line(
        f"  chosen for {minutes:g} minutes: {shape}; {size.first} + {size.anneal} steps for the first candidate, "
        f"{size.later} + {size.anneal} for the second"
    )
    terminal.line(f"  seconds expected: {parts}")
    if size.over > 30:
        terminal.line(
            f"  on this machine, as busy as it is now, that takes about {sum(size.seconds.values()) / 60:.1f} minutes: "
            "fewer steps would show nothing"
        )
    _write_policies(workspace, size)
    edits = {KERNELS: plain_kernels, RECIPE: lambda text: _recipe_text(text, shape, size)}
    fork(
        code_root(),
        workspace.repository,
        edits,
        "The demo begins with plain kernels, and a model that fits this machine",
    )


def _read_recipe(text: str) -> dict[str, Any]:
    """What a recipe's file says, and no default: a recipe is written of it again."""
    from kernels.contract.strict_yaml import read_yaml
    from trainer.contract.errors import RecipeError

    found = read_yaml(text, RECIPE, RecipeError)
    assert isinstance(found, dict), RECIPE
    return found


def _predicted(raw: dict[str, Any], found: dict[str, Any]) -> dict[Shape, float]:
    """Seconds of the products, attention and loss head of a step of each shape, by the rates that the probe found."""
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
    """Steps of the recipe in a process of its own, whose compiled code the training that follows finds again. ``start_s``: what
    starting such a program takes, twice its imports.

    Raises: FactoryError with what it said last.
    """
    folder = workspace.root / "cache"
    folder.mkdir(exist_ok=True)
    given, kernels = folder / "demo-recipe.yaml", folder / "demo-kernels.yaml"
    given.write_text(yaml.safe_dump(recipe))
    kernels.write_text(plain_kernels((code_root() / KERNELS).read_text("utf-8")))
    words = ["-m", "agents.line_profiler.step_rate", "--recipe", str(given), "--kernels", str(kernels)]
    environment = {
        "PYTHONPATH": str(code_root()),
        "TORCHINDUCTOR_CACHE_DIR": str(devices.compiled(workspace.root)),
    }
    began = time.monotonic()
    with terminal.task(f"timing steps of {title} (the first compiles)"):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=code_root(),
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            preexec_fn=die_with(os.getpid()),
        )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise FactoryError(f"a step of the demo's recipe could not be timed: {said}")
    found = dict(json.loads(done.stdout.splitlines()[-1]))
    return found | {"start_s": 2 * (time.monotonic() - began - found["whole_s"])}


def _recipe_text(text: str, shape: Shape, size: Size) -> str:
    raw = shape.recipe(_read_recipe(text))
    raw["schedule"] |= {"trunk_steps": {"first": size.first, "later": size.later}, "anneal_steps": size.anneal}
    return "# Sized by 'factory demo' for this machine.\n" + yaml.safe_dump(raw, sort_keys=False)


def _write_policies(workspace: Workspace, size: Size) -> None:
    """Copies of the policies with as much measuring as there is time for; the thresholds are the shipped ones."""
    own = workspace.root / "policies"
    changes: dict[str, dict[str, Any]] = {
        "evals.yaml": size.evals,
        "agents.yaml": {"measure_seconds": size.measure_seconds},
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
    """kernels.yaml with what runs untuned in place of ``auto``: where a factory stands before it has measured anything."""
    from agents.core.yaml_edit import set_value
    from kernels.contract.choice import UNTUNED

    for device, choice in yaml.safe_load(policy).items():
        for op in choice if isinstance(choice, dict) else ():
            policy = set_value(policy, (device, op), UNTUNED.get(op, "reference"))
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
        raise InputError(f"{folder} holds no shards: run 'factory demo --fresh'")
    terminal.line("  " + ", ".join(f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in found))
    return found


def _bad_shard(workspace: Workspace, ledger: Ledger) -> Path:
    """Made once, when the first documents are in: it holds copies of ingested and of held-out documents."""
    from factory.corpus import write_bad_shard

    path = workspace.root / "corpus" / BAD_SHARD
    if not path.exists():
        write_bad_shard(path, workspace, ledger)
    return path


def _arrive(workspace: Workspace, ledger: Ledger, files: list[Path]) -> None:
    """Drop shards into the inbox as a person would; those already ingested stay where they are."""
    from trainer.contract.data.token_shard import file_sha256

    known = {row["sha256"] for row in ledger.rows(sa.select(shards.c.sha256))}
    for path in files:
        if file_sha256(path) not in known:
            aside = workspace.inbox / f"{path.name}.part"
            shutil.copyfile(path, aside)
            os.replace(aside, workspace.inbox / path.name)


def _code_loop(workspace: Workspace, ledger: Ledger, terminal: Terminal) -> None:
    from factory.code_loop.proposing import propose

    if ledger.one(sa.select(proposals.c.number).where(proposals.c.verdict.is_not(None))) is None:
        with workspace.lock("code-loop"):
            propose(workspace, ledger, terminal, agent="search")
