"""A person's decisions and requests while another process holds the workspace, and what the daemon does with them in its next pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.duties.duty import Duty, DutyTask
from factory.duties.requests import ASKED
from factory.duties.runner import run_duty_pass
from factory.duties.table import DUTIES
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.anomalies import CLOSED, list_open_anomalies, read_newest_details_by_anomaly
from factory.ledger.ledger import Ledger, candidates, verdicts
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.release import releases
from factory.release.releases import release_candidate
from factory.retrying.daemon_requests import (
    WorkInvalidatedError,
    list_open_requests,
    record_finished_request,
    request_actions,
)
from factory.retrying.trainer_deaths import REFUSED, TrainerFailure, record_trainer_death
from factory.training import planning
from factory.training.planning import plan_trunk
from factory.training.segment_folder import record_segment_done
from tests.support.factory.at_work import at_work
from tests.support.factory.command import command_here, factory
from tests.support.factory.errands import next_due
from tests.support.failing.limits import few_handles
from tests.support.messages import codes, refused, says
from tests.support.plants.saved_plant import KINDS, diagnosed, note
from tests.support.said import Said

HOW = "workspace.wait_for_model_loop"


def candidate_of(ledger: Ledger, segment: int) -> int:
    """A candidate that was judged and held."""
    with ledger.begin() as tx:
        tx.execute(
            candidates.insert().values(
                id=1, segment=segment, checkpoint="c", export_path="e", export_sha256="e", created_at=0.0
            )
        )
        tx.execute(
            verdicts.insert().values(
                gate="release", subject="candidate:1", policy_sha256="p", subject_sha256="e", outcome="hold", reasons=[], evidence={},
                created_at=0.0,
            )
        )  # fmt: skip
    return 1


# -- one transaction: it needs no lock ---------------------------------------------------------------------------------
def test_anomalies_are_answered_and_a_segment_rewound_while_the_workspace_is_in_use(
    restored: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = restored
    first, second = note(ledger, 1, 12), note(ledger, 1, 14)
    diagnosed(ledger, first, 1, ["true plateau"], [])
    diagnosed(ledger, second, 1, ["unknown"], [])
    with at_work(workspace):
        accepted = command_here("anomalies", "accept", str(first), home=workspace)
        assert f"nomaly {first}" in accepted.stdout and "closed" in accepted.stdout
        rejected = command_here("anomalies", "reject", str(second), home=workspace)
        assert f"nomaly {second}" in rejected.stdout and "closed" in rejected.stdout
        assert "egment 1 is rewound" in command_here("rewind", "1", home=workspace).stdout
    assert not list_open_anomalies(ledger, KINDS) and SegmentRow.get(ledger, 1).state == "rewound"
    with refused("diagnosis.closed", InputError, anomaly=first, how="accepted"):
        raise command_here("anomalies", "accept", str(first), home=workspace).exception or AssertionError
    assert read_newest_details_by_anomaly(ledger, CLOSED)[first]["how"] == "accepted"


# -- what the daemon was doing at that moment is given up -----------------------------------------------------------------
def rewind_here(workspace: Workspace, segment: int) -> None:
    done = command_here("rewind", str(segment), home=workspace)
    assert done.exit_code == 0, done.exception


def test_a_segment_that_was_rewound_while_it_trained_is_neither_done_nor_parked(
    restored: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = restored
    row = SegmentRow.get(ledger, 1)
    number = plan_trunk(Plant(workspace, ledger))
    planned = SegmentRow.get(ledger, number)
    rewind_here(workspace, number)
    with refused("retrying.rewound", WorkInvalidatedError, segment=number):
        record_segment_done(ledger, planned, Path(row.folder), dict(row.result or {}))
    with pytest.raises(WorkInvalidatedError):
        record_trainer_death(ledger, planned, TrainerFailure(REFUSED, "ended"), 1, 1, park_now=True)
    assert SegmentRow.get(ledger, number).state == "rewound"


def test_a_plan_that_a_rewind_made_out_of_date_is_made_again(
    restored: tuple[Workspace, Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, ledger = restored
    monkeypatch.setattr(planning, "_refuse_padding", lambda *_: rewind_here(workspace, 1))  # in the midst of the plan
    with refused("retrying.plan_out_of_date", WorkInvalidatedError):
        plan_trunk(Plant(workspace, ledger))
    assert [row.state for row in SegmentRow.select(ledger)] == ["rewound"], "none was planned after it"
    monkeypatch.undo()
    assert SegmentRow.get(ledger, plan_trunk(Plant(workspace, ledger))).parent is None


def test_a_candidate_that_is_rewound_at_the_last_moment_is_not_released(
    restored: tuple[Workspace, Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, ledger = restored
    candidate_of(ledger, 1)
    with ledger.begin() as tx:
        tx.execute(verdicts.update().values(outcome="promote"))
    monkeypatch.setattr(
        releases, "check_export_is_judged_one", lambda *_: rewind_here(workspace, 1)
    )  # the last before it is decided
    with pytest.raises(InputError, match="segment 1 .* was rewound"):
        release_candidate(Plant(workspace, ledger), 1, approved_by="ann")
    assert ledger.read("SELECT * FROM releases") == []


def only_asked(doing: Callable[[Duty], Duty]) -> tuple[Duty, ...]:
    """The table with requests only: no other duty is due."""
    others = (doing(duty) for duty in DUTIES if not duty.each and duty is not ASKED)
    return (ASKED, *(replace(duty, due=lambda look: ()) for duty in others))


# -- what needs the daemon's hand: it is asked ------------------------------------------------------------------------------
def test_the_daemon_does_each_request_to_judge_diagnose_or_audit_once(restored: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = restored
    candidate, anomaly = candidate_of(ledger, 1), note(ledger, 1, 12)
    before = next_due(Plant(workspace, ledger))
    home = ("-w", str(workspace.root))
    with at_work(workspace) as process:
        said = factory("evaluate", "1", *home)
        asked = "The running daemon does this in its next pass"
        told = f"{asked}: judge 1. This command cannot do it now, because {workspace.root} is in use: process {process} holds model-loop.lock"
        assert (said.returncode, said.stdout) == (0, f"  {told}\n")
        as_json = json.loads(command_here("evaluate", "--json", home=workspace).stdout)
        assert (as_json["candidate"], as_json["says"]["text"]) == (1, told)
        assert f"{asked}: diagnose 1. " in factory("diagnose", "1", "--steps", "7", *home).stdout
        assert f"{asked}: audit 1. " in command_here("audit", "--segment", "1", home=workspace).stdout
        assert factory("diagnose", "9", *home).returncode == 2
    wanted = list_open_requests(ledger)
    assert list(wanted) == [f"judge {candidate}", f"diagnose {anomaly}", "audit 1"]
    assert wanted[f"diagnose {anomaly}"]["replayed_steps"] == 7
    shown = [line for line in command_here("status", home=workspace).stdout.splitlines() if line.startswith("request")]
    assert len(shown) == 3 and "'judge 1'" in shown[0] and "'factory run'" in shown[0]
    facts = json.loads(command_here("status", "--json", home=workspace).stdout)["asked"]
    assert [one["action"] for one in facts] == list(wanted)

    done: list[tuple[str, object, object]] = []

    def doing(duty: Duty) -> Duty:
        return replace(duty, do=lambda _, subject, **how: done.append((duty.name, subject, how)))

    run_duty_pass(Plant(workspace, ledger), duties=only_asked(doing))
    assert done == [("judge", 1, {}), ("diagnose", anomaly, {"replayed_steps": 7}), ("audit", 1, {})]
    assert not list_open_requests(ledger) and next_due(Plant(workspace, ledger)) == before
    assert "asked" not in command_here("status", home=workspace).stdout


def test_no_request_is_recorded_while_another_command_holds_the_workspace(restored: tuple[Workspace, Ledger]) -> None:
    """'factory train' does not read requests, and a daemon that starts weeks later must not find an old one."""
    workspace, ledger = restored
    candidate_of(ledger, 1)
    with at_work(workspace, "factory"):
        said = command_here("evaluate", "1", home=workspace)
    assert says(said.exception.message, (HOW, {})) and not list_open_requests(ledger)


def test_a_request_that_is_repeated_during_its_work_is_done_again(ledger: Ledger) -> None:
    judge = "judge 3"
    request_actions(ledger, [judge], "ann")
    begun = list_open_requests(ledger)[judge]["event"]
    request_actions(ledger, [judge], "bo")
    record_finished_request(ledger, judge, begun)
    assert list_open_requests(ledger)[judge]["by"] == "bo"
    record_finished_request(ledger, judge, list_open_requests(ledger)[judge]["event"])
    assert not list_open_requests(ledger)


def test_an_impossible_request_is_reported_once(restored: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = restored
    request_actions(ledger, ["audit 1", "jugde 1", "judge one"], "ann")
    said = Said()
    run_duty_pass(Plant(workspace, ledger, said), duties=only_asked(lambda duty: duty))
    assert ["'jugde 1'" in said.lines[0], "'judge one'" in said.lines[1]] == [True, True] and len(said.lines) == 3
    assert codes(said.lines)[2] == "duties.request_refused" and said.lines[2].data["errand"] == "audit 1"  # type: ignore[attr-defined]
    with refused("duties.unknown", InputError, request="jugde 1", duty="jugde"):
        DutyTask.parse("jugde 1", DUTIES)
    with refused("duties.no_number", InputError, request="judge one", number="one"):
        DutyTask.parse("judge one", DUTIES)
    assert not list_open_requests(ledger)


def test_a_request_is_not_lost_to_a_fault_of_the_machine(restored: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = restored
    request_actions(ledger, ["judge 1"], "ann")

    def fails(*_: object) -> None:
        with few_handles():
            Tokenizer.load(workspace.tokenizer)

    with pytest.raises(InputError, match="Too many open files"):
        run_duty_pass(Plant(workspace, ledger), duties=only_asked(lambda duty: replace(duty, do=fails)))
    assert list(list_open_requests(ledger)) == ["judge 1"]


# -- what is refused says what to do ------------------------------------------------------------------------------------------
def test_ingest_names_the_inbox_while_the_daemon_runs(workspace: Workspace, ledger: Ledger, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    for words in ([], ["--again"]):
        with at_work(workspace) as process:
            said = factory("ingest", str(tmp_path / "a.jsonl"), *words, "-w", str(workspace.root))
        assert said.returncode == 3 and f"process {process} holds model-loop.lock" in said.stderr
        assert "error[ingest.daemon_runs]" in said.stderr and f"{workspace.inbox}: the daemon ingests" in said.stderr


def test_a_command_that_is_refused_says_how_to_run_it(workspace: Workspace, ledger: Ledger) -> None:
    with at_work(workspace) as process:
        for words in (["train"], ["anneal"], ["average"], ["clean"], ["check", "--repair"], ["restore"], ["upgrade"]):
            said = command_here(*words, home=workspace)
            assert f"process {process} holds model-loop.lock" in str(said.exception), said.output
            assert says(said.exception.message, (HOW, {})), words
