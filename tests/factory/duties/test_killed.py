"""The daemon is killed before, during and after each duty. The next pass must end like an undisturbed pass.

The daemon's process is a fork of this one. Its ends of transactions and its changes of names are counted, and at one of them it ends at once,
as by SIGKILL. What it leaves is compared with what is left undisturbed as the chaos scenarios compare it (``tests.chaos.state``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow  # noqa: F401 (before the forks, each of which would import it)
import pandas  # noqa: F401
import pytest
import sympy  # noqa: F401

from factory.core.workspace import Workspace
from factory.data.removing import apply_removal, plan_removal
from factory.data.selecting import list_removable_fates, select_documents_by_name
from factory.duties.runner import run_duty_pass
from factory.duties.table import DUTIES
from factory.ingest.inbox import ingest_inbox_file
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.sandbox import live_sandbox
from factory.training.averaging import plan_average
from factory.training.exporting import export_candidate
from factory.training.planning import plan_anneal, plan_trunk
from factory.training.training import run_segment
from tests.chaos.state import differences, state_of
from tests.support.factory.made_up_text import prose
from tests.support.plants.release_scene import add_verdict, promote, write_replicas
from tests.support.plants.saved_plant import SavedPlant

ENDED, RENAMES = 9, ("os.rename", "os.link", "os.symlink", "os.remove", "os.mkdir", "shutil.rmtree")


def arrives(plant: Plant) -> None:
    rows = ({"id": f"n{i}", "text": prose(5000 + i), "source": f"s{i}", "license": "MIT"} for i in range(40))
    (plant.workspace.inbox / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def ingested(plant: Plant) -> None:
    arrives(plant)
    ingest_inbox_file(plant, plant.workspace.inbox / "new.jsonl")


def changed(plant: Plant) -> None:
    """A shard that was filed is another file now."""
    ingested(plant)
    (filed,) = (plant.workspace.shards / "raw").iterdir()
    filed.write_bytes(filed.read_bytes()[: filed.stat().st_size // 2])


def taken_out(plant: Plant) -> None:
    keys = plant.ledger.read("SELECT key FROM documents WHERE fate = 'train' AND domain = 'docs' ORDER BY key LIMIT 2")
    chosen = plan_removal(
        plant.ledger,
        select_documents_by_name(plant.ledger, [row["key"] for row in keys], list_removable_fates(True)),
        True,
    )
    apply_removal(plant.ledger, chosen, "ann", "law", erase=True)


def remembers(plant: Plant) -> None:
    old, policy = plant.workspace.root / "old", plant.workspace.policy_path("data.yaml")
    old.mkdir()
    rows = [{"text": " ".join(f"old{number}x{word}" for word in range(40))} for number in range(40)]
    (old / "old.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy.write_text(f"{policy.read_text()}\nreplay_corpus: {old}\n")


def annealed(plant: Plant) -> None:
    run_segment(plant, plan_anneal(plant))


def averaged(plant: Plant) -> None:
    run_segment(plant, plan_average(plant, "held-out-loss", last=2))


def released(plant: Plant) -> None:
    annealed(plant)
    candidate = export_candidate(plant, 2)
    write_replicas(plant.workspace, "from_release: 1, steps_max: 1.0")
    promote(plant.ledger, 1, candidate, add_verdict(plant.ledger, candidate))


# What makes a duty due in a plant with one trained trunk, and how many kills: each costs what the duty does. Behind a colon: the case of it.
SCENES: dict[str, tuple[Callable[[Plant], object], int]] = {
    "back_up": (lambda plant: None, 3),
    "finish_removals": (taken_out, 4),
    "update_inbox": (changed, 3),
    "ingest": (arrives, 4),
    "ingest_replay": (remembers, 3),
    "plan_anneal": (lambda plant: None, 3),
    "plan_trunk": (ingested, 3),
    "train": (lambda plant: plan_trunk(plant, 2), 3),
    "train: an average": (lambda plant: plan_average(plant, "held-out-loss", last=2), 3),
    "export": (annealed, 3),
    "export: an average": (averaged, 3),
    "replicate": (released, 3),
}
SLOW = {
    "train": "four trainings, three of which are killed",
    "export": "an anneal, and four exports",
    "train: an average": "four averages whose parts are measured, three of which are killed",
    "export: an average": "four exports of one average",
    "replicate": "two replicas are trained and measured four times",
}
# What needs minutes for each kill, or another scene: where it is killed.
ELSEWHERE = {
    "notify": "tests/factory/show/notifications/test_notifications.py",
    "answer_approvals": "tests/factory/release/test_release_approvals.py",
    "publish": "tests/factory/release/test_releases.py",
    "show": "tests/factory/show/mlflow/test_tracking.py",
    "open_reverts": "tests/chaos: audit",
    "follow_approvals": "tests/factory/code_loop/test_approvals.py",
    "judge_merged_again": "tests/chaos: merge",
    "judge_held_again": "tests/chaos: merge",
    "improve": "tests/factory/code_loop/test_improving.py",
    "report_releasable": "one event, at once",
    "finish_release": "tests/factory/release/test_releases.py",
    "release_import": "tests/factory/presets/test_imported_workspace.py",
    "measure_import": "tests/chaos: judge",  # the same evaluation, in one transaction
    "diagnose": "tests/factory/diagnosis/test_diagnosing.py",
    "release": "tests/factory/release/test_releases.py",
    "judge": "tests/chaos: judge",
    "asked": "with the duty that it hands on",
    "word": "tests/factory/diagnosis/test_wording.py",
    "audit": "tests/factory/audit/test_auditing.py",
}


@pytest.fixture(scope="module", autouse=True)
def one_fork_server(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of this process (``tests.support.forks.quick``), for trainers of all that are forked from it: else each would start one."""
    folder, nothing = tmp_path_factory.mktemp("warm"), [sys.executable, "-c", ""]
    away = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    live_sandbox.start_in_sandbox(
        nothing, writable=[], readonly=[], cwd=folder, cache=folder, environment={}, nodes=[], **away
    ).wait()


def in_a_process(root: Path, act: Callable[[Plant], object], end_at: int | None = None) -> int:
    """``act`` in a fork, ended at the so many-th effect, or after the last; returns how many it made, or −1: it was ended."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        made, status = 0, 1

        def effect(*_: Any) -> None:
            nonlocal made
            if made == end_at:
                os._exit(ENDED)
            made += 1

        try:
            workspace = Workspace.open(root)
            ledger = Ledger.open(workspace.ledger_url, workspace.root)
            dialect = ledger.engine.dialect
            commit = dialect.do_commit
            dialect.do_commit = lambda connection: (effect(), commit(connection), effect())  # type: ignore[method-assign, assign]
            sys.addaudithook(lambda event, _: effect() if event in RENAMES else None)
            act(Plant(workspace, ledger))
            # How many effects there are depends on a trainer's time a little: it is killed after them.
            if end_at is not None:
                os._exit(ENDED)
            os.write(writes, str(made).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writes)
    with os.fdopen(reads) as said:
        count = said.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == (0 if count else ENDED), f"the process ended with {code}"
    return int(count or -1)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow(SLOW[name]) if name in SLOW else ()) for name in SCENES]
)
def test_the_next_pass_completes_a_duty_that_was_killed_at_any_moment(name: str, saved_once: SavedPlant) -> None:
    killed_and_finished(name, saved_once, SCENES[name][1])


@pytest.mark.long("some 25 kills of each duty of a second")
@pytest.mark.parametrize("name", [name for name in SCENES if name not in SLOW])
def test_the_next_pass_completes_a_duty_that_was_killed_at_many_more_moments(name: str, saved_once: SavedPlant) -> None:
    killed_and_finished(name, saved_once, 25)


def killed_and_finished(name: str, saved_once: SavedPlant, kills: int) -> None:
    table = tuple(duty for duty in DUTIES if duty.name == name.partition(":")[0])
    a_pass = lambda plant: run_duty_pass(plant, settle=0.0, duties=table)
    site, root = saved_once.folder, saved_once.workspace.root
    prepare, _ = SCENES[name]

    with saved_once.restored():
        in_a_process(root, prepare)
        before = state_of(site)
        effects = in_a_process(root, a_pass)
        undisturbed = state_of(site)
        assert effects > 1 and (name == "back_up" or undisturbed != before), "it was not done"
    for which in range(kills):
        with saved_once.restored():
            in_a_process(root, prepare)
            at = which * effects // (kills - 1)
            assert in_a_process(root, a_pass, at) == -1
            in_a_process(root, a_pass)
            assert not differences(undisturbed, state_of(site)), f"killed at effect {at} of {effects}"


def test_every_duty_has_a_test_that_kills_it() -> None:
    assert {duty.name for duty in DUTIES} == {name.partition(":")[0] for name in SCENES} | ELSEWHERE.keys()
    for place in ELSEWHERE.values():
        assert not place.endswith(".py") or "kill" in Path(place).read_text().lower(), place
