"""What is run, killed and run again: the factory's own commands, on a workspace of two small shards and a model of 50,000 weights.

A scenario starts where another one ended. All lie in one folder, the site: ``plant`` is the workspace, ``target`` the code's repository.
Training runs outside the sandbox here, where the shim sees the trainer; what runs inside (replays, gates) makes no effect that counts.
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

from factory.duties.duty import Errand, Look
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
    """``kinds``: the daemon's duties that belong to it; others wait for the next scenario."""

    after: str  # the scenario whose end it starts from; '': an empty workspace
    kinds: frozenset[str] = frozenset()
    commands: Commands = (RUN,)
    prepare: Callable[[Path], None] = field(default=lambda site: None)  # done once, before anything counts
    alike: bool = False  # it ends as the one before did
    live_log: bool = False  # SQLite's logs stay as ``prepare`` left them


def drive(name: str, site: Path) -> None:
    """One process of the factory, from its start to its end; what ends one early ends all."""
    if name.startswith("prepare "):
        SCENARIOS[name.removeprefix("prepare ")].prepare(site)
        return
    for words in SCENARIOS[name].commands:
        if words[0] in CALLS:
            _call(CALLS[words[0]], site)
        else:
            _command([*words, "--workspace", str(site / "plant")], SCENARIOS[name].kinds)


def _command(words: Sequence[str], kinds: frozenset[str]) -> None:
    """The ``factory`` command. A person's decision that was carried out already is refused (2), which is as good."""
    from factory.cli.app import main
    from factory.duties import runner

    next_errands = runner.next_errands

    def only(look: Look) -> list[Errand]:
        return [errand for errand in next_errands(look) if errand.duty.each or errand.duty.name in kinds]

    with mock.patch.object(runner, "next_errands", only), mock.patch.object(sys, "argv", ["factory", *words]):
        try:
            main()
        except SystemExit as end:
            if end.code and (words[0] not in DECISIONS or end.code != 2):
                raise


def _call(function: Callable[[Path], None], site: Path) -> None:
    """A part of a command; errors become what the command line makes of them."""
    from factory.cli.app import exit_code

    try:
        function(site)
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        raise SystemExit(code) from None


def preload() -> None:
    """Import what the commands import, before the fork: a run would spend half of its time on it."""
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
    """As a pass of the daemon does what follows a diagnosis of which it was killed before it acted."""
    from factory.diagnosis.diagnosing import diagnose_and_act
    from factory.ledger.anomalies import settled

    workspace, ledger = opened(site)
    if 1 not in settled(ledger):
        diagnose_and_act(Plant(workspace, ledger), 1)


def _erase(site: Path) -> None:
    """As ``factory data remove --erase``; the daemon's next pass finishes what is recorded."""
    from factory.ledger.removals import removals

    if len(removals(opened(site)[1])) < 2:
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
