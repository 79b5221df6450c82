"""A person's decision about a candidate, with a real ledger and a real MLflow store. The factory reads the decision, answers and records it.

Forged decisions are refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from mlflow.tracking import MlflowClient

from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.duties.back_off import run_in_background
from factory.ledger.decisions import list_undecided_verdicts
from factory.ledger.ledger import Ledger, candidates
from factory.ledger.plant import Plant
from factory.ledger.reader import LedgerReader
from factory.ledger.rows import ReleaseRow, find_champion
from factory.release.approvals import ApprovalNeededError, record_approval, record_rejection
from factory.show.mlflow.approval_answers import ApprovalResponder
from factory.show.mlflow.registry import MODEL
from factory.show.mlflow.releases import register_candidate
from factory.show.mlflow.store import open_client
from factory.status.waiting import list_items_waiting_for_person
from tests.support.factory.errands import due_of
from tests.support.factory.shown import reconcile, release
from tests.support.messages import codes, refused
from tests.support.patience import PATIENCE_S
from tests.support.plants.release_scene import add_candidate, add_verdict, approval, with_store
from tests.support.said import Said


@pytest.fixture(autouse=True)
def policy(workspace: Workspace) -> None:
    with_store(workspace)
    approval(workspace, "manual")


class Person:
    """A person in MLflow's UI, who sets and reads tags."""

    def __init__(self, workspace: Workspace, ledger: Ledger) -> None:
        self.client: MlflowClient = open_client(workspace)
        self.answers = ApprovalResponder(Plant(workspace, ledger, Said()))

    def says(self, version: str, **tags: str) -> list[str]:
        for key, value in tags.items():
            self.client.set_model_version_tag(MODEL, version, key, value)
        return self.answers.answer_new_decisions()

    def reads(self, version: str, key: str = "approval_answer") -> str:
        return str(self.client.get_model_version(MODEL, version).tags.get(key, ""))


@pytest.fixture
def person(workspace: Workspace, ledger: Ledger) -> Person:
    return Person(workspace, ledger)


def said_in(ledger: Ledger, kind: str) -> list[dict[str, str]]:
    return [row["detail"] for row in ledger.read("SELECT detail FROM events WHERE kind = :kind ORDER BY id", kind=kind)]


@pytest.mark.parametrize("step", ["set_registered_model_alias", "set_model_version_tag"])
def test_after_a_kill_the_next_pass_shows_that_a_candidate_waits(
    workspace: Workspace, ledger: Ledger, person: Person, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The version is made first, with its tags. Alias, report and the request for approval follow."""
    add_verdict(ledger, add_candidate(workspace, ledger))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(MlflowClient, step, killed)
        register_candidate(Plant(workspace, ledger), 1)
    assert person.reads("1", "verdict_id") == "1" and person.reads("1", "approval") == ""
    reconcile(Plant(workspace, ledger))
    assert person.reads("1", "approval") == "pending" and (workspace.reports / "candidate-1.html").exists()
    assert (
        person.client.get_model_version_by_alias(MODEL, "candidate").version == 1
        and reconcile(Plant(workspace, ledger)) == []
    )


def test_an_approval_by_command_counts_only_for_the_judged_export(
    workspace: Workspace, ledger: Ledger, person: Person
) -> None:
    verdict = add_verdict(ledger, add_candidate(workspace, ledger))
    with refused("approvals.waits", ApprovalNeededError, candidate=1):
        release(Plant(workspace, ledger), verdict)
    assert find_champion(ledger) is None
    register_candidate(Plant(workspace, ledger), 1)
    assert person.reads("1", "approval") == "pending" and "factory releases approve 1" in person.reads("1")
    record_approval(ledger, verdict, "ada")
    assert release(Plant(workspace, ledger), verdict) == 1
    row = find_champion(ledger)
    assert row and row.approved_by == "ada"
    assert (person.reads("1", "approval"), person.reads("1")) == (
        "approved",
        "approved by ada and released as release 1",
    )

    second = add_candidate(workspace, ledger)
    later = add_verdict(ledger, second, against=1)
    record_approval(ledger, later, "ada")
    (workspace.exports / "candidate-2" / "config.json").write_text("changed after the approval")
    with refused("checks.changed_export", InputError, candidate=2):
        release(Plant(workspace, ledger), later, approved_by="ada")


def test_each_waiting_candidate_can_be_approved_or_rejected_in_mlflow(
    workspace: Workspace, ledger: Ledger, person: Person
) -> None:
    """This holds for older candidates too. Each decision is read once, and has an answer, a reason and a name."""
    verdicts = [add_verdict(ledger, add_candidate(workspace, ledger)) for _ in range(3)]
    versions = [register_candidate(Plant(workspace, ledger), number) for number in (1, 2, 3)]
    assert (
        person.answers.answer_new_decisions() == [] and [row.id for row in list_undecided_verdicts(ledger)] == verdicts
    )
    said = person.says(versions[2], approval="rejected", approval_reason="it swears")
    assert (
        said == [f"version 3 of {MODEL}: rejected by mlflow: it swears"] and person.answers.answer_new_decisions() == []
    )
    assert said_in(ledger, "rejected")[0].items() >= {"by": "mlflow", "why": "it swears"}.items()
    assert person.reads(versions[2]) == "rejected by mlflow: it swears"
    assert [row.id for row in list_undecided_verdicts(ledger)] == verdicts[:2]

    assert person.says(versions[1], approval=" Approved ", approval_by="ada") == [
        f"version 2 of {MODEL}: approved by ada (mlflow) and released as release 1"
    ]
    assert person.answers.answer_new_decisions() == [] and reconcile(Plant(workspace, ledger)) == []
    row = find_champion(ledger)
    assert row and (row.candidate, row.approved_by) == (2, "ada (mlflow)")
    assert (person.reads(versions[1], "approval"), person.reads(versions[1], "release")) == ("approved", "1")
    # Candidate 1 was judged against no champion: it no longer waits, and its approval is refused with the reason.
    assert list_undecided_verdicts(ledger) == []
    assert "candidate:2 is champion now" in person.says(versions[0], approval="approved")[0]
    assert person.reads(versions[0], "approval") == "refused" and "factory evaluate 1" in person.reads(versions[0])
    assert len(said_in(ledger, "approval_refused")) == 1 and person.answers.answer_new_decisions() == []
    person.says(versions[0], approval="approved")
    assert person.reads(versions[0], "approval") == "refused", "the same decision is read again"


def test_an_approval_after_a_rejection_of_the_same_verdict_is_refused(
    workspace: Workspace, ledger: Ledger, person: Person
) -> None:
    verdict = add_verdict(ledger, add_candidate(workspace, ledger))
    version = register_candidate(Plant(workspace, ledger), 1)
    record_rejection(Plant(workspace, ledger), verdict, "bob", "too early")
    record_rejection(Plant(workspace, ledger), verdict, "bob", "too early")
    assert len(said_in(ledger, "rejected")) == 1
    with refused("approvals.rejected", InputError, verdict=verdict, decision="rejected by bob: too early"):
        release(Plant(workspace, ledger), verdict, approved_by="ada")
    with refused("approvals.rejected", InputError, verdict=verdict):
        record_approval(ledger, verdict, "ada")
    assert "was rejected by bob: too early" in person.says(version, approval="approved")[0]
    assert ReleaseRow.select(ledger) == []
    # An automatic policy does not release it either, not even with a new verdict. A person may approve the new verdict.
    approval(workspace, "automatic")
    assert due_of(Plant(workspace, ledger), "release") == []
    again = add_verdict(ledger, 1)
    assert due_of(Plant(workspace, ledger), "release") == []
    with pytest.raises(ApprovalNeededError):
        release(Plant(workspace, ledger), again)
    register_candidate(Plant(workspace, ledger), 1)
    assert person.reads(version, "approval") == "pending"
    assert person.says(version, approval="approved") == [
        f"version 1 of {MODEL}: approved by mlflow and released as release 1"
    ]
    with refused("approvals.already_released", InputError, candidate=1, release=1):
        record_rejection(Plant(workspace, ledger), again, "bob", "")
    assert "was already released as release 1" in person.says(version, approval="rejected")[0]


def test_forged_approvals_are_refused_with_the_reason(workspace: Workspace, ledger: Ledger, person: Person) -> None:
    held, waits = add_candidate(workspace, ledger), add_candidate(workspace, ledger)
    add_verdict(ledger, held, "hold")
    add_verdict(ledger, waits)
    for number in (held, waits):
        register_candidate(Plant(workspace, ledger), number)
    source = person.client.get_model_version(MODEL, "2").source
    real = dict(person.client.get_model_version(MODEL, "2").tags)

    def forged(**changed: str) -> str:
        tags = real | {"approval": "approved"} | changed
        return str(person.client.create_model_version(MODEL, source, tags=tags).version)

    expected = {
        "1": "is 'hold', not 'promote'",
        forged(export_sha256="0" * 64): "is not the export of candidate 2",
        forged(): "Candidate 2 is version 2, not version 4",
        forged(candidate="77"): "no candidate 77",
        forged(candidate="2; DROP TABLE releases"): "no candidate 0",
        forged(candidate="1"): "is not the export of candidate 1",
    }
    person.says("1", approval="approved")
    for version, why in expected.items():
        assert why in person.reads(version) and person.reads(version, "approval") == "refused", version
    assert "'yes, please' of the tag" in person.says("2", approval="Yes, please")[0]
    assert ReleaseRow.select(ledger) == [] and said_in(ledger, "approved") == []
    assert len(said_in(ledger, "approval_refused")) == len(expected) + 1

    # MLflow still shows an older verdict to the person.
    add_verdict(ledger, waits)
    answer = person.says("2", approval="approved")[0]
    assert "verdict 2 on candidate:2" in answer and "is verdict 3: 'promote'" in answer
    register_candidate(Plant(workspace, ledger), waits)
    assert person.reads("2", "approval") == "pending"
    # A decision from before MLflow showed the new verdict counts for the older verdict.
    person.client.set_model_version_tag(MODEL, "2", "approval", "approved")
    add_verdict(ledger, waits)
    reconcile(Plant(workspace, ledger))
    assert person.reads("2", "approval") == "pending" and person.answers.answer_new_decisions() == []
    # The export on disk has changed; later the ledger's row too.
    (workspace.exports / "candidate-2" / "config.json").write_text("{}")
    assert "config.json" in person.says("2", approval="approved")[0] or "has changed" in person.reads("2")
    with ledger.begin() as tx:
        tx.execute(candidates.update().where(candidates.c.id == waits).values(export_sha256="1" * 64))
    assert "is not the export of" in person.says("2", approval="approved")[0]
    assert ReleaseRow.select(ledger) == []


def test_a_decision_is_answered_while_the_main_thread_works(
    workspace: Workspace, ledger: Ledger, person: Person
) -> None:
    """The answering thread has its own ledger, as in the daemon, which trains for hours. An error of MLflow does not end the thread."""
    add_verdict(ledger, add_candidate(workspace, ledger))
    version = register_candidate(Plant(workspace, ledger), 1)
    said = Said()
    answers = ApprovalResponder(Plant(workspace, Ledger.open(workspace.ledger_url), said))
    database = workspace.root / "mlflow.db"
    away = database.rename(database.with_name("away.db"))
    database.write_bytes(b"no database " * 100)
    with run_in_background(
        Plant(workspace, ledger, said), "answering approvals", 0.05, answers.answer_and_announce_decisions
    ):
        until(lambda: said.about("Training and releases continue") and said.about("candidate 1 waits for approval"))
        away.rename(database)
        person.client.set_model_version_tag(MODEL, version, "approval", "approved")
        until(
            lambda: person.reads(version).endswith("released as release 1") and find_champion(ledger)
        )  # the answer stands once it is decided
    until(lambda: said.about("answers again"))  # printed after the answer is in MLflow
    row = find_champion(ledger)
    assert row and row.approved_by == "mlflow"


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_status_lists_waiting_candidates_with_the_commands(workspace: Workspace, ledger: Ledger) -> None:
    for _ in range(2):
        add_verdict(ledger, add_candidate(workspace, ledger))
    found = list_items_waiting_for_person(workspace, LedgerReader(workspace))
    assert codes(one["what"] for one in found) == ["waiting.candidate"] * 2
    assert [one["what"].data["candidate"] for one in found] == [1, 2]
    assert found[0]["command"].startswith("factory releases approve 1,") and "reject 1 --why" in found[0]["command"]
