"""``factory demo``: runs the whole factory once, on real text, with the daemon's code, in the given minutes.

Only the arrival of the shards and the later start of the code loop are scripted. The daemon's duties decide everything else. Every number on the last
screen except the cost is read from the ledger. Measurements of this machine determine the size of the model, the steps and the size of evaluations
(``demo_size``). After a kill, the same command continues the demo.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import yaml

from factory.backups.backups import make_or_open_ledger
from factory.computing.tuned_kernels import KERNELS
from factory.core import devices
from factory.core.console import Terminal
from factory.core.errors import FactoryError, InputError, WorkspaceError
from factory.core.launching import run_python
from factory.core.workspace import MODEL_LOOP, Workspace, WorkspaceConfig, find_checkout_root
from factory.demo import demo_size
from factory.demo.demo_size import LADDER, DemoPlan, DemoShape, DemoTimings
from factory.demo.summary import summarise_demo
from factory.duties.runner import run_duty_pass
from factory.git.repository import fork_repository, get_live_commit
from factory.ingest.inbox import ingest_and_move, list_complete_files
from factory.ledger.ledger import sa, shards
from factory.ledger.plant import Plant
from factory.ledger.status import read_status
from kernels.contract.files import write_atomically
from kernels.contract.message import Message

MARK = ".demo"  # --fresh removes only a folder with this file
BAD_SHARD = "surprise-00.jsonl"
MEASURING_COMMIT = "measuring"  # stands for a commit, before the demo's repository has one
CODE = "code"  # folder in the workspace: the demo's own repository, so that yours gets no branches
RECIPE = "policies/recipes/demo.yaml"
SMALL_CORPUS_MINUTES = 4.0  # with fewer minutes, the corpus is half of the library


def run_demo(
    folder: Path, terminal: Terminal, *, minutes: float = demo_size.DEFAULT_MINUTES, fresh: bool = False
) -> None:
    """Run the demo. Raises: InputError for minutes out of range; WorkspaceError when the folder has files that no demo made."""
    began = time.monotonic()
    demo_size.check_minutes(minutes)
    root = folder.expanduser().resolve()
    prepare_demo_folder(root, fresh)
    terminal.print_heading(
        Message("demo.step_corpus", "1  Make a workspace, and a corpus from the standard library of this Python")
    )
    workspace = Workspace.create(root, WorkspaceConfig(repository=CODE))
    _write_data_policy(workspace)
    plant = Plant(workspace, make_or_open_ledger(workspace), terminal)
    with workspace.hold_lock(MODEL_LOOP):
        corpus = _corpus(workspace, terminal, minutes)
        first = [path for path in corpus if path.stem.endswith("-00")]
        terminal.print_heading(Message("demo.step_ingest", "2  Ingest the first shards"))
        send_new_files_to_inbox(plant, first)
        ingesting = time.monotonic()
        for path in list_complete_files(plant, settle_seconds=0.0):
            ingest_and_move(plant, path)
        if not workspace.repository.exists():
            terminal.print_heading(
                Message("demo.step_measure", "3  Measure the speed of this machine, and choose the model and its steps")
            )
            _fit(workspace, terminal, minutes, began, time.monotonic() - ingesting)
        terminal.print_heading(Message("demo.step_release", "4  Train, evaluate, judge and release candidate 1"))
        run_duty_pass(plant, settle=0.0)
        terminal.print_heading(
            Message(
                "demo.step_second",
                "5  Ingest new shards (one is bad), continue the trunk, and judge candidate 2 against the champion",
            )
        )
        send_new_files_to_inbox(plant, [path for path in corpus if path not in first] + [_bad_shard(plant)])
        run_duty_pass(plant, settle=0.0)
        terminal.print_heading(
            Message(
                "demo.step_improve",
                "6  Improve the factory's own code: time every line of the training step, propose a patch, judge it",
            )
        )
        failure: FactoryError | None = None
        try:
            _improve_when_idle(workspace)
            run_duty_pass(plant, settle=0.0)
        except FactoryError as error:  # for example without a sandbox; the earlier results stay
            failure = error
            terminal.line(Message("demo.no_code_loop", "  The code loop could not run: {error}", error=error))
    terminal.print_heading(Message("demo.step_summary", "7  What happened"))
    for line in summarise_demo(workspace, read_status(workspace), time.monotonic() - began):
        terminal.line(line)
    if failure:
        raise failure


def prepare_demo_folder(root: Path, fresh: bool) -> None:
    """Make and mark a demo's folder; ``fresh`` removes an earlier demo first. Raises: WorkspaceError for files that no demo made."""
    if root.exists() and any(root.iterdir()):
        if not (root / MARK).exists():
            raise WorkspaceError(
                "demo.other_files",
                "{folder} has files that no demo made. Choose another folder with --workspace.",
                folder=root,
            )
        if fresh:
            if (root / "factory.yaml").exists():
                with Workspace.open(root).hold_lock(MODEL_LOOP):  # refuses a folder in which a demo runs
                    pass
            shutil.rmtree(root)
    root.mkdir(parents=True, exist_ok=True)
    (root / MARK).touch()


def _fit(workspace: Workspace, terminal: Terminal, minutes: float, began: float, ingest: float) -> None:
    """Measure this machine, choose the sizes, and write them into the recipe, the kernels and the workspace's policies."""
    from factory.computing.compute_settings import describe_precision, measure_precision
    from trainer.contract.recipe import Recipe

    raw = _read_recipe((find_checkout_root() / RECIPE).read_text("utf-8"))
    found = measure_precision(Recipe.parse(raw))
    terminal.line(f"  {describe_precision(found)}")
    plain = use_plain_kernels((find_checkout_root() / KERNELS).read_text("utf-8"))
    shape = demo_size.guess_first_shape(minutes, _predicted(raw, found))
    for attempt in range(3):
        sized = shape.apply_to_recipe(raw) | {"precision": found["precision"]}
        measured = measure_step_rate(workspace, terminal, sized, str(shape), plain, MEASURING_COMMIT)
        terminal.line(
            Message(
                "demo.measured",
                "  {shape}: {milliseconds:,.0f} ms a step, {rate:,.0f} tokens/s",
                shape=str(shape),
                milliseconds=measured["step_s"] * 1e3,
                rate=measured["tokens_per_s"],
            )  # fmt: skip
        )
        better = demo_size.guess_next_shape(minutes, shape, measured["step_s"])
        climbs = LADDER.index(better) > LADDER.index(shape)
        if better == shape or attempt == 2 or (climbs and attempt == 1):  # the chosen shape must have been measured
            break
        shape = better
    seen = DemoTimings(time.monotonic() - began, ingest, measured["start_s"], measured["step_s"])
    size = demo_size.plan_demo(minutes, seen)
    terminal.line(
        Message(
            "demo.chosen",
            "  For {minutes:g} minutes, the demo chose {shape}. Candidate 1 is trained for {first} steps and annealed for {anneal} steps. "
            "Candidate 2 is trained for {later} steps and annealed for {anneal} steps.",
            minutes=minutes,
            shape=str(shape),
            first=size.first,
            later=size.later,
            anneal=size.anneal,
        )  # fmt: skip
    )
    terminal.line(
        Message(
            "demo.expected",
            "  Expected time of each part, in seconds: {parts}",
            parts=[f"{name} {seconds:.0f}" for name, seconds in size.seconds.items()],
        )
    )
    if size.over > 30:
        terminal.line(
            Message(
                "demo.takes_longer",
                "  With its present load, this machine needs about {minutes:.1f} minutes for the demo. The number of steps was not reduced "
                "further, because the model would learn too little.",
                minutes=sum(size.seconds.values()) / 60,
            )  # fmt: skip
        )
    _write_policies(workspace, size)
    edits = {KERNELS: use_plain_kernels, RECIPE: lambda text: _recipe_text(text, shape, size)}
    title = Message("demo.commit", "Use plain kernels and a model that fits this machine, for the demo")
    fork_repository(find_checkout_root(), workspace.repository, edits, title)
    measured_with = devices.get_compiled_code_folder(workspace.root, MEASURING_COMMIT)
    if measured_with.is_dir():  # the factory's own checkout compiled it, so training may use it
        own = devices.get_compiled_code_folder(workspace.root, get_live_commit(workspace.repository))
        shutil.rmtree(own, ignore_errors=True)
        measured_with.rename(own)


def _read_recipe(text: str) -> dict[str, Any]:
    """Return the keys of a recipe file, without defaults."""
    from kernels.contract.strict_yaml import read_yaml
    from trainer.contract.errors import RecipeError

    found = read_yaml(text, RECIPE, RecipeError)
    assert isinstance(found, dict), RECIPE
    return found


def _predicted(raw: dict[str, Any], found: dict[str, Any]) -> dict[DemoShape, float]:
    """For each shape, the seconds of a step's matrix products, attention and loss head, from the probe's rates."""
    import torch

    from trainer.contract.plan.precision import DTYPES, make_timed_parts
    from trainer.contract.recipe import Recipe

    rates = found["probe"]["rates"][found["precision"]]
    threads = torch.get_num_threads() if found["probe"]["device"] == "cpu" else 1
    predicted = {}
    for shape in LADDER:
        made = make_timed_parts(
            Recipe.parse(shape.apply_to_recipe(raw)), torch.device("cpu"), DTYPES[found["precision"]]
        )
        predicted[shape] = sum(part.flops / rates[name] for name, part in made.items()) / threads
    return predicted


def measure_step_rate(
    workspace: Workspace, terminal: Terminal, recipe: dict[str, Any], title: str, kernels_text: str, commit: str
) -> dict[str, float]:
    """Measure the rate of the recipe's steps in a separate process. ``kernels_text``: of kernels.yaml. ``commit``: names the folder of compiled code.

    The result also has ``start_s``: the time to start such a program, counted as twice its imports. Raises: FactoryError with the last line of the
    program's output.
    """
    folder = workspace.root / "cache"
    folder.mkdir(exist_ok=True)
    given, kernels = folder / "demo-recipe.yaml", folder / "demo-kernels.yaml"
    given.write_text(yaml.safe_dump(recipe))
    kernels.write_text(kernels_text)
    arguments = ["-m", "agents.line_profiler.step_rate", "--recipe", str(given), "--kernels", str(kernels)]
    cache = str(devices.get_compiled_code_folder(workspace.root, commit) / "inductor")
    began = time.monotonic()
    with terminal.task(
        Message(
            "demo.timing", "measure the time of a step with {shape} (the first step includes compiling)", shape=title
        )
    ):
        done = run_python(find_checkout_root(), *arguments, TORCHINDUCTOR_CACHE_DIR=cache)
    if done.returncode:
        raise FactoryError(
            "demo.not_timed", "A step of the demo's recipe could not be timed: {error}",
            error=(done.stderr.strip().splitlines() or ["no output"])[-1],
        )  # fmt: skip
    found = dict(json.loads(done.stdout.splitlines()[-1]))
    return found | {"start_s": 2 * (time.monotonic() - began - found["whole_s"])}


def _recipe_text(text: str, shape: DemoShape, size: DemoPlan) -> str:
    raw = shape.apply_to_recipe(_read_recipe(text))
    raw["schedule"] |= {"trunk_steps": {"first": size.first, "later": size.later}, "anneal_steps": size.anneal}
    comment = Message("demo.recipe_comment", "# 'factory demo' chose these sizes for this machine.\n")
    return comment + yaml.safe_dump(raw, sort_keys=False)


def _write_data_policy(workspace: Workspace) -> None:
    """Write the shipped policy, but hold out a module's code, docs and chats together, because they quote one another."""
    from agents.core.yaml_edit import set_yaml_value

    path = workspace.root / "policies" / "data.yaml"
    if not path.exists():
        text = (find_checkout_root() / "policies" / "data.yaml").read_text("utf-8")
        for domain in ("code", "docs", "chat"):
            text = set_yaml_value(text, ("domains", domain, "group"), "source")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _write_policies(workspace: Workspace, size: DemoPlan) -> None:
    """Write copies of the policies with the shipped thresholds, but with as many measurements as the time allows."""
    changes: dict[str, dict[str, Any]] = {
        "evals.yaml": size.evals,
        "agents.yaml": {
            "measure_seconds": size.measure_seconds,
            "improve": {"when": "off", "agents": ["search"], "per_day": {"device_seconds": size.improve_seconds}},
        },
        "gates/patch.yaml": {"training": size.patch},
    }
    for name, values in changes.items():
        write_smaller_policy(workspace, name, values)


def write_smaller_policy(workspace: Workspace, name: str, values: dict[str, Any]) -> None:
    """Write the workspace's own copy of a shipped policy with fewer measurements. ``values``: keys that replace or extend the shipped ones."""
    raw = yaml.safe_load((find_checkout_root() / "policies" / name).read_text("utf-8"))
    for key, value in values.items():
        raw[key] = raw.get(key, {}) | value if isinstance(value, dict) else value
    path = workspace.root / "policies" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    comment = Message(
        "demo.policy_comment",
        "# The shipped policy, with fewer measurements so that 'factory demo' ends in time.\n",
    )
    path.write_text(comment + yaml.safe_dump(raw, sort_keys=False))


def use_plain_kernels(policy: str) -> str:
    """Return the text of kernels.yaml with the plain expression as every choice, so that the code loop can find an improvement."""
    from agents.core.yaml_edit import set_yaml_value
    from kernels.contract.choice import PLAIN

    for device, choice in yaml.safe_load(policy).items():
        for op in choice if isinstance(choice, dict) else ():
            policy = set_yaml_value(policy, (device, op), PLAIN.get(op, "reference"))
    return policy


def _corpus(workspace: Workspace, terminal: Terminal, minutes: float) -> list[Path]:
    from factory.corpus import write_corpus

    folder, aside = workspace.root / "corpus", workspace.root / "corpus.part"
    if not folder.exists():
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        write_corpus(aside, terminal, 1.0 if minutes >= SMALL_CORPUS_MINUTES else 0.5)
        os.rename(aside, folder)
    found = sorted(path for path in folder.glob("*.jsonl") if path.name != BAD_SHARD)
    if not found:
        raise InputError("demo.no_shards", "{folder} has no shards. Run 'factory demo --fresh'.", folder=folder)
    terminal.line("  " + ", ".join(f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in found))
    return found


def _bad_shard(plant: Plant) -> Path:
    """Return the path of the bad shard. It is written after the first ingest, because it has copies of ingested and of held-out documents."""
    from factory.corpus import write_bad_shard

    path = plant.workspace.root / "corpus" / BAD_SHARD
    if not path.exists():
        write_bad_shard(path, plant)
    return path


def send_new_files_to_inbox(plant: Plant, files: list[Path]) -> None:
    """Copy shards that are not yet ingested into the inbox."""
    from trainer.contract.data.token_shard import hash_file

    known = {row["sha256"] for row in plant.ledger.select_rows(sa.select(shards.c.sha256))}
    for path in files:
        if hash_file(path) not in known:
            aside = plant.workspace.inbox / f"{path.name}.part"
            shutil.copyfile(path, aside)
            os.replace(aside, plant.workspace.inbox / path.name)


def _improve_when_idle(workspace: Workspace) -> None:
    """Set the policy so that the daemon improves the factory when it has no other work."""
    from agents.core.yaml_edit import set_yaml_value

    path = workspace.root / "policies" / "agents.yaml"
    write_atomically(path, set_yaml_value(path.read_text("utf-8"), ("improve", "when"), "when-idle"))
