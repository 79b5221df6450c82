"""Diagnoses in a plant: bad and hostile input, kills, and the commands."""

from __future__ import annotations

import json
import os
import shutil
import sys
import venv
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from agents.loss_doctor.causes import TABLE
from agents.loss_doctor.curves import KINDS as KINDS_OF_A_CURVE
from factory.cli.app import app
from factory.core.errors import ConfigError, InputError, SegmentError
from factory.core.workspace import Workspace
from factory.diagnosis import diagnosing
from factory.diagnosis.diagnosing import diagnose_and_act
from factory.diagnosis.remedies import accept_diagnosis
from factory.diagnosis.replay_bench import AnomalyEpisode
from factory.git.repository import CheckoutError
from factory.ledger.anomalies import (
    ASKED,
    DIAGNOSED,
    REPLICAS_DIFFER,
    find_next_undiagnosed_anomaly,
    list_anomalies,
    list_open_anomalies,
    list_open_anomalies_of_lineage,
)
from factory.ledger.ledger import Ledger, checkpoints, segments
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, Subject
from factory.ledger.status import format_status, read_status
from factory.runs.arm import Arm
from factory.runs.arm_runner import ArmRunner
from factory.training.planning import plan_trunk, read_data_plan
from factory.training.segment_folder import record_segment_done
from tests.support.factory.errands import next_due
from tests.support.failing.limits import few_handles
from tests.support.git import git
from tests.support.messages import refused
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.plants.saved_plant import KINDS, diagnosed, note
from tests.support.plants.trained_plant import train_anneal

HOSTILE = {
    "no step": '{"loss": 1.0}',
    "far apart": '{"step": 2, "loss": 1e308, "grad_norm": 1e308}\n{"step": 3, "loss": -1e308, "grad_norm": -1e308}',
}


KEEPS = """
import json, os, pathlib, sys, time
folders = [pathlib.Path(word) for word in sys.argv[1:] if word != "--wait"]
for number, mine in enumerate(folders):
    while not (mine / "segment.json").exists():
        time.sleep(0.01)
    kept = mine.parent / "kept"
    (mine / "seen").write_text(json.dumps([number, kept.exists()]))
    kept.touch()
    (mine / "result.json").write_text("{}")
"""


def test_untrusted_code_carries_no_state_from_one_arm_to_the_next(
    workspace: Workspace, ledger: Ledger, tmp_path: Path
) -> None:
    (tmp_path / "code" / "trainer").mkdir(parents=True)
    (tmp_path / "code" / "trainer" / "__main__.py").write_text(KEEPS)
    base = {"kind": "trunk", "recipe": {}, "data_plan": {"token_shards": []}, "first_step": 0, "last_step": 4}
    runs = ArmRunner(Plant(workspace, ledger), workspace.root / "diagnosed", "diagnosis", Subject("anomaly", 1))
    episode = cast(AnomalyEpisode, SimpleNamespace(choose_code_folder=lambda arm: tmp_path / "code"))
    trainers = diagnosing._Trainers(runs, episode, PATIENCE_S)
    for repeat in (0, 1):
        ended = trainers(Arm(f"arm {repeat}", base | {"initial_checkpoint": None}, "c0ffee", repeat=repeat))
        assert not ended.failed
        assert json.loads((ended.folder / "seen").read_text()) == [0, False], "(arms before in its process, a file)"


def test_an_impossible_diagnosis_has_a_reason_and_is_not_repeated(restored: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = restored
    early, slow = note(ledger, 1, 3), note(ledger, 1, 15, "throughput_drop")
    assert (
        find_next_undiagnosed_anomaly(ledger, KINDS) == early
        and next_due(Plant(workspace, ledger)) == f"diagnose {early}"
    )
    with refused("diagnosis.no_budget", ConfigError, budget=0):
        diagnose_and_act(Plant(workspace, ledger), early, steps=0)
    with pytest.raises(InputError, match="no anomaly 99"):
        diagnose_and_act(Plant(workspace, ledger), 99)
    with refused("diagnosis.not_of_the_loss", InputError, anomaly=slow, kind="throughput_drop"):
        diagnose_and_act(Plant(workspace, ledger), slow)
    found = diagnose_and_act(Plant(workspace, ledger), early)
    assert found["causes"] == ["unknown"] and " step 15" in found["why"], found
    assert find_next_undiagnosed_anomaly(ledger, KINDS) is None and [
        row.id for row in list_open_anomalies_of_lineage(ledger, 1, KINDS)
    ] == [early]
    assert any("factory anomalies show" in line for line in format_status(read_status(workspace)))
    late = note(ledger, 1, 18)
    with ledger.begin() as tx:
        other = dict(SegmentRow.get(ledger, 1).computing or {}) | {"machine": {"device": "cuda", "name": "cuda-sm90"}}
        tx.execute(segments.update().where(segments.c.id == 1).values(computing=other))
    assert "trained on cuda-sm90" in diagnose_and_act(Plant(workspace, ledger), late)["why"]
    with ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == 1).values(computing=None))
    shutil.rmtree(read_data_plan(ledger, SegmentRow.get(ledger, 1))["token_shards"][0]["path"])
    assert "its documents cannot be replayed" in diagnose_and_act(Plant(workspace, ledger), late)["why"]
    assert accept_diagnosis(ledger, early, "ada").code == "diagnosis.accepted"
    assert [row.id for row in list_open_anomalies(ledger, KINDS)] == [late]
    with refused("diagnosis.closed", InputError, anomaly=early, how="accepted", person="ada"):
        accept_diagnosis(ledger, early, "bob")


def test_a_fault_of_the_machine_is_not_recorded_as_a_diagnosis(
    restored: tuple[Workspace, Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is recorded, so the next pass tries again. A wrong file that a replay left is not a fault of the machine."""
    workspace, ledger = restored
    number = note(ledger, 1, 18)

    def with_no_handle(*_: object) -> None:
        with few_handles():
            open(workspace.root / "factory.yaml")  # noqa: SIM115 - it is not opened

    monkeypatch.setattr(diagnosing, "_episode", with_no_handle)
    with pytest.raises(OSError, match="Too many open files"):
        diagnose_and_act(Plant(workspace, ledger), number)
    monkeypatch.setattr(diagnosing, "_episode", lambda *_: os.listdir(workspace.root / "factory.yaml"))
    assert find_next_undiagnosed_anomaly(ledger, KINDS) == number and not events(ledger, DIAGNOSED)
    assert "Not a directory" in diagnose_and_act(Plant(workspace, ledger), number)["why"]
    assert find_next_undiagnosed_anomaly(ledger, KINDS) is None


def test_code_that_cannot_be_checked_out_now_is_not_recorded_as_a_diagnosis(restored: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = restored
    number, commit = note(ledger, 1, 18), SegmentRow.get(ledger, 1).code_commit
    blob = git(workspace.repository, "rev-parse", f"{commit}:trainer/__init__.py")
    lost = workspace.repository / ".git" / "objects" / blob[:2] / blob[2:]
    lost.rename(workspace.root / "lost")
    with pytest.raises(CheckoutError, match=r"has lost .*trainer/__init__\.py"):
        diagnose_and_act(Plant(workspace, ledger), number)
    (workspace.root / "lost").rename(lost)
    assert find_next_undiagnosed_anomaly(ledger, KINDS) == number and not events(ledger, DIAGNOSED)


def test_ranks_that_drifted_apart_hold_releases_and_wait_for_a_person(restored: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = restored
    row = SegmentRow.get(ledger, 1)
    with ledger.begin() as tx:
        tx.execute(checkpoints.delete())
    hostile = "\x1b[2Jembedding"
    record_segment_done(ledger, row, Path(row.folder), dict(row.result or {}) | {"replicas_apart": [hostile, 3]})
    (found,) = [a for a in list_open_anomalies_of_lineage(ledger, 1, KINDS) if a.kind == REPLICAS_DIFFER]
    assert find_next_undiagnosed_anomaly(ledger, KINDS) == found.id
    told = diagnose_and_act(Plant(workspace, ledger), found.id)
    assert told["causes"] == ["hardware", "layout"] and "embedding, 3" in told["why"] and "\x1b" not in told["why"]
    assert told["done"].code == "diagnosis.person_decides" and find_next_undiagnosed_anomaly(ledger, KINDS) is None
    assert [a.id for a in list_open_anomalies_of_lineage(ledger, 1, KINDS)] == [found.id]


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_hostile_metrics_end_in_a_diagnosis_and_do_not_stop_the_daemon(
    restored: tuple[Workspace, Ledger], line: str
) -> None:
    workspace, ledger = restored
    with (Path(SegmentRow.get(ledger, 1).folder) / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    number = note(ledger, 1, 4)
    found = diagnose_and_act(Plant(workspace, ledger), number)
    assert found["causes"] == ["unknown"] and find_next_undiagnosed_anomaly(ledger, KINDS) is None
    assert ("without a step" in found["why"]) == (line == HOSTILE["no step"]), found["why"]


def test_an_impossible_anomaly_in_the_trainers_file_is_refused(restored: tuple[Workspace, Ledger]) -> None:
    _, ledger = restored
    row = SegmentRow.get(ledger, 1)
    path = Path(row.folder) / "anomalies.jsonl"
    with ledger.begin() as tx:
        tx.execute(checkpoints.delete())
    for step, kind, code in (
        (-1, "loss_spike", "training.anomaly_outside"),
        (20, "loss_spike", "training.anomaly_outside"),
        (10**17, "loss_spike", "training.anomaly_outside"),
        (True, "plateau", "training.anomaly_malformed"),
        (3, "\x1b[2J", "training.anomaly_malformed"),
    ):
        path.write_text(json.dumps({"step": step, "kind": kind}) + "\n")
        with refused(code, SegmentError, file=path):
            record_segment_done(ledger, row, Path(row.folder), dict(row.result or {}))
    path.write_text(json.dumps({"step": 19, "kind": "loss_spike"}) + "\n")
    record_segment_done(ledger, row, Path(row.folder), dict(row.result or {}))
    assert [(a["step"], a["kind"]) for a in list_anomalies(ledger)] == [(19, "loss_spike")]


def test_a_closed_anomaly_is_not_diagnosed_again(restored: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = restored
    number = note(ledger, 1, 12)
    diagnosed(ledger, number, 1, ["unknown"], [])
    accept_diagnosis(ledger, number, "ada")
    with refused("diagnosis.closed", InputError, anomaly=number, how="accepted", person="ada"):
        diagnose_and_act(Plant(workspace, ledger), number)
    assert len(events(ledger, DIAGNOSED)) == 1


def test_the_documentation_of_anomalies_names_every_kind_and_every_cause() -> None:
    page = (ROOT / "docs" / "ANOMALIES.md").read_text()
    assert [kind for kind in (*KINDS_OF_A_CURVE, *KINDS) if f"`{kind}`" not in page] == []
    assert [cause for _, causes, _ in TABLE for cause in causes if cause not in page] == []


@pytest.mark.long("a second environment, and replays in the sandbox, two of them in it")
@pytest.mark.parametrize("broken", [True, False])
def test_after_a_change_of_libraries_the_window_is_replayed_with_the_old_ones(
    restored: tuple[Workspace, Ledger], tmp_path: Path, broken: bool
) -> None:
    """The other environment has the same packages. A broken one shows that the replay used it."""
    workspace, ledger = restored
    venv.create(tmp_path / "before", symlinks=True, with_pip=False)
    (packages,) = (tmp_path / "before").glob("lib/python*/site-packages")
    (packages / "packages.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
    if broken:
        (packages / "sitecustomize.py").write_text("raise SystemExit('an older environment')\n")
    policy = (ROOT / "policies" / "anomalies.yaml").read_text()
    (workspace.root / "policies" / "anomalies.yaml").write_text(
        f"{policy}previous_python: {tmp_path / 'before' / 'bin' / 'python'}\n"
    )
    segment = train_anneal(workspace, ledger)
    with ledger.begin() as tx:
        older = dict(SegmentRow.get(ledger, 1).computing or {})
        older["machine"] |= {"torch": "0.1"}
        tx.execute(segments.update().where(segments.c.id == 1).values(computing=older))
    first = SegmentRow.get(ledger, segment).first_step
    found = diagnose_and_act(Plant(workspace, ledger), note(ledger, segment, first + 1), steps=9)
    (arm,) = [arm for arm in found["arms"] if arm["arm"] == "previous environment"]
    assert ("an older environment" in arm["failed"]) == broken, arm
    assert (arm["failed"] == "") == (not broken) and found["causes"] != ["code change"], found


def test_after_a_kill_the_next_pass_acts_on_the_recorded_diagnosis(
    restored: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = restored
    key = ledger.read("SELECT key FROM documents WHERE fate = 'train' ORDER BY key")[0]["key"]
    number = note(ledger, 1, 12)
    diagnosed(ledger, number, 1, ["bad data"], [key])
    assert find_next_undiagnosed_anomaly(ledger, KINDS) == number
    found = diagnose_and_act(Plant(workspace, ledger), number)  # nothing is replayed again
    assert found["why"] == "so it was" and found["done"].code == "diagnosis.quarantined"
    assert (found["done"].data["documents"], found["done"].data["segment"]) == (1, 1)
    assert find_next_undiagnosed_anomaly(ledger, KINDS) is None and len(events(ledger, DIAGNOSED)) == 1

    other = note(ledger, SegmentRow.get(ledger, plan_trunk(Plant(workspace, ledger))).id, 12)
    diagnosed(ledger, other, 1, ["unknown"], [])
    assert diagnose_and_act(Plant(workspace, ledger), other)["done"].code == "diagnosis.person_decides"
    assert find_next_undiagnosed_anomaly(ledger, KINDS) is None and len(events(ledger, ASKED)) == 1


def events(ledger: Ledger, kind: str) -> list[dict[str, Any]]:
    return ledger.read("SELECT id FROM events WHERE kind = :kind", kind=kind)


def test_the_anomaly_commands_show_anomalies_and_diagnoses(restored: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = restored
    run = lambda *words: CliRunner().invoke(app, [*words, "--workspace", str(workspace.root)])
    assert "No anomaly was reported yet" in run("anomalies", "list").output
    assert "No anomaly waits" in run("diagnose").output
    number = note(ledger, 1, 12)
    assert "has no diagnosis yet" in run("anomalies", "show", str(number)).output
    diagnosed(ledger, number, 1, ["data × state"], [])
    assert "data × state" in run("anomalies", "list").output
    assert json.loads(run("anomalies", "show", str(number), "--json").output)["diagnosis"]["why"] == "so it was"
    assert "closed" in run("anomalies", "accept", str(number)).output
    assert list_anomalies(ledger)[-1]["how"] == "accepted"
