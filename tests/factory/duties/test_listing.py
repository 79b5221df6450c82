"""``factory duties``: its lines for people, and its JSON for programs."""

from __future__ import annotations

import json
import time

from factory.core.workspace import Workspace
from factory.duties.duty import Duty, DutyTask, always_due
from factory.duties.listing import NAME, collect_duty_facts, read_duty_status_file, write_duty_status_file
from factory.duties.table import DUTIES
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.retrying.daemon_requests import TRAINING, pause_daemon
from factory.retrying.failure_waits import FailureWaits
from tests.support.factory.command import command_here
from tests.support.failing.deaths import plan_row


def test_factory_duties_lists_due_held_resting_and_done_duties(workspace: Workspace, ledger: Ledger) -> None:
    first, second = (plan_row(ledger, kind="anneal", state="done").id for _ in range(2))
    number = plan_row(ledger).id
    pause_daemon(ledger, TRAINING, "ada", "lunch")
    backoff = FailureWaits(60.0, 600.0)
    backoff.record_failure(f"export {first}", "its checkpoint is gone")
    write_duty_status_file(
        workspace, backoff.list_failures_by_key(), DutyTask(next(duty for duty in DUTIES if duty.name == "judge"), 3)
    )
    policies = workspace.root / "policies"
    policies.mkdir(exist_ok=True)
    (policies / "anomalies.yaml").write_text("stepps: 4\n")

    shown = command_here("duties", home=workspace).stdout.splitlines()
    places = [next(n for n, line in enumerate(shown) if f"  {duty.name}  " in line) for duty in DUTIES]
    assert list(dict.fromkeys(places)) == sorted(set(places)), "in the order of the table"
    at_train, at_export = (places[[duty.name for duty in DUTIES].index(name)] for name in ("train", "export"))
    below = {duty.name: shown[at + 1].strip() for duty, at in zip(DUTIES, places)}
    assert below["train"] == f"due: train {number}" and "waits: ada paused training" in shown[at_train + 2]
    assert below["export"] == f"due: export {first}, export {second}"
    assert f"export {first} failed 1 time " in shown[at_export + 2]
    assert below["diagnose"].startswith("due: unknown: ") and "did you mean 'steps'?" in below["diagnose"]
    assert below["judge"].startswith("last done: judge 3, ")

    found = {one["name"]: one for one in json.loads(command_here("duties", "--json", home=workspace).stdout)}
    assert [one["rank"] for one in found.values()][:3] == [1, 2, 3] and found["notify"]["when"].startswith("every 2 s")
    assert found["export"]["rests"][f"export {first}"]["until"][:2] == "20", "a moment, as other commands write it"
    assert found["plan_trunk"]["held"] and not found["export"]["held"] and not found["back_up"]["due"]


def test_the_note_of_the_daemon_is_written_only_when_its_content_changes(workspace: Workspace) -> None:
    backoff = FailureWaits(60.0, 600.0)
    backoff.record_failure("judge 3", "no")
    write_duty_status_file(workspace, backoff.list_failures_by_key())
    written = (workspace.logs / NAME).stat()
    time.sleep(0.01)
    write_duty_status_file(workspace, backoff.list_failures_by_key())
    assert (workspace.logs / NAME).stat().st_ino == written.st_ino, "an idle pass writes nothing"
    backoff.record_failure("judge 3", "no")
    write_duty_status_file(workspace, backoff.list_failures_by_key())
    assert read_duty_status_file(workspace)["rests"]["judge 3"]["failures"] == 2
    backoff.record_success("judge 3")
    write_duty_status_file(
        workspace, backoff.list_failures_by_key(), DutyTask(Duty("judge", "", always_due, always_due), 3)
    )
    assert (
        read_duty_status_file(workspace)["rests"] == {}
        and read_duty_status_file(workspace)["done"]["judge"]["errand"] == "judge 3"
    )
    (workspace.logs / NAME).write_text("[")
    assert read_duty_status_file(workspace) == {"done": {}, "rests": {}}
    assert collect_duty_facts(Plant(workspace, Ledger.create(workspace.ledger_url)))
