"""Scenarios: runs of the factory's own commands on a workspace with two small shards and a model of 50,000 weights.

A scenario starts from the end of another one. Their folder, the site, has ``plant`` (the workspace) and ``target`` (the repository of the code).
Training runs outside the sandbox, so that the shim sees the trainer. Programs in the sandbox (replays, gates) make no effects that count.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from factory.duties.duty import DutyState, DutyTask
from factory.ledger.plant import Plant
from tests.chaos import starts
from tests.chaos.starts import opened

Commands = tuple[tuple[str, ...], ...]
RUN: tuple[str, ...] = ("run", "--once")
IMPORTED = (
    "cli", "duties", "audit", "backups", "code_loop", "core", "data", "diagnosis", "erasing", "gates.release", "git", "ingest",
    "ledger", "release", "repairs", "retention", "retrying", "show", "status", "training",
)  # fmt: skip
DECISIONS = frozenset({"proposals", "releases"})  # commands that carry out a person's decision


@dataclass(frozen=True)
class Scenario:
    """One scenario. ``kinds``: the daemon's duties that it runs; other duties wait for the next scenario."""

    after: str  # it starts from the end of this scenario; '': from an empty workspace
    kinds: frozenset[str] = frozenset()
    commands: Commands = (RUN,)
    prepare: Callable[[Path], None] = field(default=lambda site: None)  # called once, before effects are counted
    alike: bool = False  # it must end in the state of the scenario before
    live_log: bool = False  # SQLite's logs stay as ``prepare`` left them


def drive(name: str, site: Path) -> None:
    """Run a scenario's commands in this process. A command that ends early ends the scenario."""
    if name.startswith("prepare "):
        SCENARIOS[name.removeprefix("prepare ")].prepare(site)
        return
    for words in SCENARIOS[name].commands:
        if words[0] in CALLS:
            _call(CALLS[words[0]], site)
        else:
            _command([*words, "--workspace", str(site / "plant")], SCENARIOS[name].kinds)


def _command(words: Sequence[str], kinds: frozenset[str]) -> None:
    """Run a ``factory`` command. A person's decision that was already carried out may be refused with exit code 2."""
    from factory.cli.app import main
    from factory.duties import runner

    next_tasks = runner.find_next_duty_tasks

    def only(look: DutyState) -> list[DutyTask]:
        return [task for task in next_tasks(look) if task.duty.each or task.duty.name in kinds]

    with mock.patch.object(runner, "find_next_duty_tasks", only), mock.patch.object(sys, "argv", ["factory", *words]):
        try:
            main()
        except SystemExit as end:
            if end.code and (words[0] not in DECISIONS or end.code != 2):
                raise


def _call(function: Callable[[Path], None], site: Path) -> None:
    """Run a part of a command, with the exit code of the command line after an error."""
    from factory.cli.app import print_error_and_get_exit_code

    try:
        function(site)
    except Exception as error:
        code = print_error_and_get_exit_code(error)
        if code is None:
            raise
        raise SystemExit(code) from None


def preload() -> None:
    """Import the commands' modules before the fork. Otherwise imports would take half of each run."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["USER"] = "ada"
    from factory.show.mlflow.store import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    import git.cmd  # noqa: F401
    import mlflow.tracking  # noqa: F401
    import torch
    from mlflow.store.model_registry import sqlalchemy_store as _registry  # noqa: F401
    from mlflow.store.tracking import sqlalchemy_store as _tracking  # noqa: F401

    import tests.support.factory.merged_patch  # noqa: F401

    for name in IMPORTED:
        package = importlib.import_module(f"factory.{name}")
        for module in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{package.__name__}."):
            importlib.import_module(module.name)
    torch.set_num_threads(1)


# -- calls ----------------------------------------------------------------------------------------------------------------
def _rewind(site: Path) -> None:
    """Act on a diagnosis, as the daemon's pass does after a kill between diagnosis and action."""
    from factory.diagnosis.diagnosing import diagnose_and_act
    from factory.ledger.anomalies import find_settled_anomalies

    workspace, ledger = opened(site)
    if 1 not in find_settled_anomalies(ledger):
        diagnose_and_act(Plant(workspace, ledger), 1)


def _erase(site: Path) -> None:
    """Do as ``factory data remove --erase``. The daemon's next pass finishes a recorded removal."""
    from factory.ledger.removals import list_removals

    if len(list_removals(opened(site)[1])) < 2:
        starts.remove(site, *starts.SECOND)


CALLS: dict[str, Callable[[Path], None]] = {
    "checkout": starts.checkout, "store": starts.store, "rewind": _rewind, "erase": _erase,
}  # fmt: skip
MODEL_LOOP = frozenset({"plan_anneal", "train", "export", "judge", "release", "finish_release"})
SCENARIOS = {
    "ingest": Scenario("", frozenset({"ingest"}), prepare=starts.empty_plant),
    "checkout": Scenario("ingest", commands=(("checkout",),)),
    "store": Scenario("ingest", commands=(("store",),)),
    "segment": Scenario("ingest", frozenset({"plan_trunk", "train"}), prepare=starts.with_checkout_and_store),
    "release": Scenario("segment", MODEL_LOOP),
    "judge": Scenario("segment", MODEL_LOOP, prepare=starts.with_manual_approval),
    "approve": Scenario("judge", MODEL_LOOP, prepare=starts.with_word_in_mlflow),
    "reject": Scenario("judge", MODEL_LOOP, (("releases", "reject", "1", "--why", "worse"), RUN)),
    "erase": Scenario("segment", commands=(("erase",), RUN), prepare=starts.with_erased),
    "backup": Scenario("segment", commands=(("backup",),), prepare=starts.with_all_backups, alike=True),
    "restore": Scenario("release", commands=(("restore",), RUN), prepare=starts.with_damaged_ledger, alike=True),
    "replace": Scenario("release", commands=(("restore",), RUN), prepare=starts.with_live_log, live_log=True),
    "upgrade": Scenario("segment", commands=(("upgrade",), RUN), prepare=starts.with_older_ledger, alike=True),
    "merge": Scenario("release", commands=(("proposals", "approve", "1"), RUN), prepare=starts.with_proposal),
    "revert": Scenario("merge", commands=(("proposals", "revert", "1"), RUN)),
    "diagnose": Scenario("segment", frozenset({"diagnose"}), prepare=starts.with_anomaly),
    "rewind": Scenario("segment", frozenset({"plan_trunk", "train"}), (("rewind",), RUN), starts.with_diagnosis),
}


def words_of(name: str) -> str:
    return json.dumps(SCENARIOS[name].commands)
