"""What is run, killed and run again: the factory's own commands, on a workspace of two small shards and a model of 50,000 weights.

A scenario starts where another one ended. All lie in one folder, the site: ``plant`` is the workspace, ``target`` the code's repository.
Training runs outside the sandbox here, where the shim sees the trainer; what runs inside (replays, gates) makes no effect that counts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import yaml

from tests.support.git import git
from tests.support.paths import ROOT

Commands = tuple[tuple[str, ...], ...]
RUN: tuple[str, ...] = ("run", "--once")


@dataclass(frozen=True)
class Scenario:
    """``kinds``: the daemon's actions that belong to it; others wait for the next scenario."""

    after: str  # the scenario whose end it starts from; '': an empty workspace
    kinds: frozenset[str] = frozenset()
    commands: Commands = (RUN,)
    prepare: Callable[[Path], None] = field(default=lambda site: None)  # done once, before anything counts


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
    from factory import daemon
    from factory.cli.app import main

    next_action = daemon.next_action

    def only(world: daemon.World) -> daemon.Action | None:
        action = next_action(world)
        return action if action and action.kind in kinds else None

    with mock.patch.object(daemon, "next_action", only), mock.patch.object(sys, "argv", ["factory", *words]):
        try:
            main()
        except SystemExit as end:
            if end.code and (words[0] != "proposals" or end.code != 2):
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
    """Import what the commands import, before the fork."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["USER"] = "ada"
    from factory.tracking.mlflow_store import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    import git.cmd  # noqa: F401
    import mlflow.tracking  # noqa: F401
    import torch
    from mlflow.store.model_registry import sqlalchemy_store as _registry  # noqa: F401
    from mlflow.store.tracking import sqlalchemy_store as _tracking  # noqa: F401

    import tests.support.factory.merged_patch  # noqa: F401

    torch.set_num_threads(1)


# -- starts ---------------------------------------------------------------------------------------------------------------
def _empty_plant(site: Path) -> None:
    """Two shards wait in the inbox of a workspace whose release policy has floors that a second of training reaches."""
    import random
    import shutil

    from factory.core.workspace import Config, Workspace
    from factory.demo.demo import plain_kernels
    from factory.ledger.ledger import Ledger
    from tests.support.plants.trained_plant import write_lenient_policies, write_shards

    target = site / "target"
    for name in ("kernels", "trainer", "policies"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    (target / "agents").mkdir()
    (target / "agents" / "__init__.py").write_text("")
    kernels = target / "policies" / "kernels.yaml"
    kernels.write_text(plain_kernels(kernels.read_text()))
    git(site, "init", "-q", "-b", "main", "--template=", str(target))
    git(target, "add", "-A")
    git(target, "commit", "-q", "-m", "base")
    config = Config(recipe="tiny", repository=str(target), training_sandbox="off", ranks=1)
    workspace = Workspace.create(site / "plant", config)
    Ledger.create(workspace.ledger_url)
    write_lenient_policies(workspace, model={"d_model": 32, "layers": 2})
    random.seed(11)
    write_shards(workspace.inbox)
    (workspace.inbox / "bad.jsonl").write_text('{"text": \n' * 8)


def _with_checkout_and_store(site: Path) -> None:
    """What the scenarios ``checkout`` and ``store`` make, and the compiled loss head."""
    from tests.support.lent_libraries import lend

    _checkout(site)
    _store(site)
    lend(_opened(site)[0])


def _with_proposal(site: Path) -> None:
    """A proposal that the gate promotes: a file changed, one new."""
    from factory.core.workspace import code_root
    from factory.git import repository
    from factory.git.scope import AgentsPolicy
    from factory.ledger.ledger import proposals
    from factory.ledger.rows import Subject
    from factory.ledger.writing import record_verdict
    from factory.tracking.tracking import Tracking

    workspace, ledger = _opened(site)
    target = workspace.repository
    base = repository.live_commit(target)
    edits = {"kernels/rms_norm/note.py": '"""A note."""\n', "trainer/tools/__init__.py": '"""Tools, changed."""\n'}
    applied = repository.apply_proposal(
        target, base, edits.items(), policy=AgentsPolicy.load(code_root() / "policies" / "agents.yaml"),
        branch="factory/search/1-x", message="m", worktrees=workspace.worktrees,
    )  # fmt: skip
    repository.remove_worktree(target, applied.worktree)
    with ledger.begin() as tx:
        verdict = record_verdict(
            tx, "patch", Subject("proposal", 1), against=base, policy_sha256="", subject_sha256=applied.patch_sha256,
            outcome="promote", reasons=["so it measured"], evidence={"stages": {}},
        )  # fmt: skip
        tx.execute(
            proposals.insert().values(
                number=1, agent="search", target="kernel:ops", title="Fuse", hypothesis="h", predicted_gain=1.1, base_commit=base,
                branch=applied.branch, commit=applied.commit, patch_sha256=applied.patch_sha256, state="judged", verdict=verdict,
                created_at=time.time(),
            )
        )  # fmt: skip
    Tracking.open(workspace, ledger).proposal_run(1)


def _with_anomaly(site: Path) -> None:
    """An anomaly that was never diagnosed, and a budget for the first replays."""
    from factory.ledger.ledger import anomalies

    workspace, ledger = _opened(site)
    policy = yaml.safe_load((ROOT / "policies" / "anomalies.yaml").read_text())
    (workspace.root / "policies" / "anomalies.yaml").write_text(yaml.safe_dump(policy | {"steps": 12}))
    with ledger.begin() as tx:
        tx.execute(anomalies.insert().values(id=1, segment=1, step=17, kind="loss_spike", detail={}))


def _with_diagnosis(site: Path) -> None:
    """An anomaly whose diagnosis named a document, which nothing was done about yet."""
    from factory.ledger.anomalies import DIAGNOSED
    from factory.ledger.ledger import anomalies, record
    from factory.ledger.rows import Subject

    _, ledger = _opened(site)
    key = ledger.read("SELECT key FROM documents WHERE fate = 'train' ORDER BY key")[0]["key"]
    blamed = {
        "anomalies": [1], "segment": 1, "kind": "loss_spike", "onset": 12, "noted": [12, 12], "last": 12, "causes": ["poisoned_document"],
        "guilty": [key], "triggers": [key], "why": "so it was", "arms": [], "report": "", "undo": [], "override": None,
    }  # fmt: skip
    with ledger.begin() as tx:
        tx.execute(anomalies.insert().values(id=1, segment=1, step=12, kind="loss_spike", detail={}))
        record(tx, DIAGNOSED, Subject("anomaly", 1), blamed)


# -- calls ----------------------------------------------------------------------------------------------------------------
def _opened(site: Path):  # type: ignore[no-untyped-def]
    from factory.core.workspace import Workspace
    from factory.ledger.ledger import Ledger

    workspace = Workspace.open(site / "plant")
    return workspace, Ledger.open(workspace.ledger_url)


def _checkout(site: Path) -> None:
    from factory.git.repository import checkout_live

    checkout_live(_opened(site)[0])


def _store(site: Path) -> None:
    from factory.tracking.mlflow_store import open_client

    open_client(_opened(site)[0])


def _rewind(site: Path) -> None:
    """As a pass of the daemon does what follows a diagnosis of which it was killed before it acted."""
    from factory.core.progress import SILENT
    from factory.diagnosis.diagnosing import diagnose_and_act
    from factory.ledger.anomalies import settled

    workspace, ledger = _opened(site)
    if 1 not in settled(ledger):
        diagnose_and_act(workspace, ledger, 1, SILENT)


CALLS: dict[str, Callable[[Path], None]] = {"checkout": _checkout, "store": _store, "rewind": _rewind}
MODEL_LOOP = frozenset({"plan_anneal", "train", "export", "judge", "release", "finish_release"})
SCENARIOS = {
    "ingest": Scenario("", frozenset({"ingest"}), prepare=_empty_plant),
    "checkout": Scenario("ingest", commands=(("checkout",),)),
    "store": Scenario("ingest", commands=(("store",),)),
    "segment": Scenario("ingest", frozenset({"plan_trunk", "train"}), prepare=_with_checkout_and_store),
    "release": Scenario("segment", MODEL_LOOP),
    "merge": Scenario("release", commands=(("proposals", "approve", "1"), RUN), prepare=_with_proposal),
    "revert": Scenario("merge", commands=(("proposals", "revert", "1"), RUN)),
    "diagnose": Scenario("segment", frozenset({"diagnose"}), prepare=_with_anomaly),
    "rewind": Scenario("segment", frozenset({"plan_trunk", "train"}), (("rewind",), RUN), _with_diagnosis),
}


def words_of(name: str) -> str:
    return json.dumps(SCENARIOS[name].commands)
