"""A person's word about a candidate, on a real ledger and a real MLflow store: heard, answered, recorded; a forged one is refused by name."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from mlflow.tracking import MlflowClient

from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.duties.back_off import in_background
from factory.ledger.decisions import undecided
from factory.ledger.ledger import Ledger, candidates
from factory.ledger.plant import Plant
from factory.ledger.reader import Reader
from factory.ledger.rows import ReleaseRow, champion
from factory.release.approvals import ApprovalNeeded, approve, reject
from factory.show.mlflow.answering import ApprovalAnswers
from factory.show.mlflow.registry import MODEL
from factory.show.mlflow.releases import register_candidate
from factory.show.mlflow.store import open_client
from factory.status.waiting import waiting
from tests.support.factory.errands import due_of
from tests.support.factory.shown import reconcile, release
from tests.support.patience import PATIENCE_S
from tests.support.plants.release_scene import add_candidate, add_verdict, approval, with_store
from tests.support.said import Said


@pytest.fixture(autouse=True)
def policy(workspace: Workspace) -> None:
    with_store(workspace)
    approval(workspace, "manual")


class Person:
    """Somebody in MLflow's UI: sets tags, reads tags."""

    def __init__(self, workspace: Workspace, ledger: Ledger) -> None:
        self.client: MlflowClient = open_client(workspace)
        self.answers = ApprovalAnswers(Plant(workspace, ledger, Said()))

    def says(self, version: str, **tags: str) -> list[str]:
        for key, value in tags.items():
            self.client.set_model_version_tag(MODEL, version, key, value)
        return self.answers.look()

    def reads(self, version: str, key: str = "approval_answer") -> str:
        return str(self.client.get_model_version(MODEL, version).tags.get(key, ""))


@pytest.fixture
def person(workspace: Workspace, ledger: Ledger) -> Person:
    return Person(workspace, ledger)


def said_in(ledger: Ledger, kind: str) -> list[dict[str, str]]:
    return [row["detail"] for row in ledger.read("SELECT detail FROM events WHERE kind = :kind ORDER BY id", kind=kind)]


@pytest.mark.parametrize("step", ["set_registered_model_alias", "set_model_version_tag"])
def test_killed_behind_the_version_a_candidate_that_waits_is_shown_as_waiting_by_the_next_pass(
    workspace: Workspace, ledger: Ledger, person: Person, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The version is made with all tags that tell what it shows; alias, report and the question come behind it."""
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


def test_approval_by_command_binds_to_what_was_judged(workspace: Workspace, ledger: Ledger, person: Person) -> None:
    verdict = add_verdict(ledger, add_candidate(workspace, ledger))
    with pytest.raises(ApprovalNeeded, match="candidate 1 waits for approval: 'factory releases approve 1'"):
        release(Plant(workspace, ledger), verdict)
    assert champion(ledger) is None
    register_candidate(Plant(workspace, ledger), 1)
    assert person.reads("1", "approval") == "pending" and "factory releases approve 1" in person.reads("1")
    approve(ledger, verdict, "ada")
    assert release(Plant(workspace, ledger), verdict) == 1
    row = champion(ledger)
    assert row and row.approved_by == "ada"
    assert (person.reads("1", "approval"), person.reads("1")) == ("approved", "released as 1, approved by ada")

    second = add_candidate(workspace, ledger)
    later = add_verdict(ledger, second, against=1)
    approve(ledger, later, "ada")
    (workspace.exports / "candidate-2" / "config.json").write_text("changed after the approval")
    with pytest.raises(InputError, match="is not what was recorded"):
        release(Plant(workspace, ledger), later, approved_by="ada")


def test_any_candidate_that_waits_is_approved_or_rejected_in_mlflow(
    workspace: Workspace, ledger: Ledger, person: Person
) -> None:
    """Not the newest one alone; each word once, with its answer, its reason and who gave it."""
    verdicts = [add_verdict(ledger, add_candidate(workspace, ledger)) for _ in range(3)]
    versions = [register_candidate(Plant(workspace, ledger), number) for number in (1, 2, 3)]
    assert person.answers.look() == [] and [row.id for row in undecided(ledger)] == verdicts
    said = person.says(versions[2], approval="rejected", approval_reason="it swears")
    assert said == [f"version 3 of {MODEL}: rejected by mlflow: it swears"] and person.answers.look() == []
    assert said_in(ledger, "rejected")[0].items() >= {"by": "mlflow", "why": "it swears"}.items()
    assert person.reads(versions[2]) == "rejected by mlflow: it swears"
    assert [row.id for row in undecided(ledger)] == verdicts[:2]

    assert person.says(versions[1], approval=" Approved ", approval_by="ada") == [
        f"version 2 of {MODEL}: released as 1, approved by ada (mlflow)"
    ]
    assert person.answers.look() == [] and reconcile(Plant(workspace, ledger)) == []
    row = champion(ledger)
    assert row and (row.candidate, row.approved_by) == (2, "ada (mlflow)")
    assert (person.reads(versions[1], "approval"), person.reads(versions[1], "release")) == ("approved", "1")
    # Candidate 1 was judged against no champion: it waits no longer, and an approval of it is refused, with the reason.
    assert undecided(ledger) == []
    assert "against no champion, but candidate:2 is champion now" in person.says(versions[0], approval="approved")[0]
    assert person.reads(versions[0], "approval") == "refused" and "evaluate it again" in person.reads(versions[0])
    assert len(said_in(ledger, "approval_refused")) == 1 and person.answers.look() == []
    person.says(versions[0], approval="approved")
    assert person.reads(versions[0], "approval") == "refused", "the same word again is heard again"


def test_what_was_rejected_is_not_released_by_an_approval_of_that_verdict(
    workspace: Workspace, ledger: Ledger, person: Person
) -> None:
    verdict = add_verdict(ledger, add_candidate(workspace, ledger))
    version = register_candidate(Plant(workspace, ledger), 1)
    reject(Plant(workspace, ledger), verdict, "bob", "too early")
    reject(Plant(workspace, ledger), verdict, "bob", "too early")
    assert len(said_in(ledger, "rejected")) == 1
    with pytest.raises(InputError, match="was rejected by bob: too early"):
        release(Plant(workspace, ledger), verdict, approved_by="ada")
    with pytest.raises(InputError, match="was rejected by bob"):
        approve(ledger, verdict, "ada")
    assert "was rejected by bob: too early" in person.says(version, approval="approved")[0]
    assert ReleaseRow.select(ledger) == []
    # By policy alone nothing happens to it either, also under a new verdict; a person may approve that one.
    approval(workspace, "automatic")
    assert due_of(Plant(workspace, ledger), "release") == []
    again = add_verdict(ledger, 1)
    assert due_of(Plant(workspace, ledger), "release") == []
    with pytest.raises(ApprovalNeeded):
        release(Plant(workspace, ledger), again)
    register_candidate(Plant(workspace, ledger), 1)
    assert person.reads(version, "approval") == "pending"
    assert person.says(version, approval="approved") == [f"version 1 of {MODEL}: released as 1, approved by mlflow"]
    with pytest.raises(InputError, match="candidate 1 is release 1 already: 'factory releases rollback N'"):
        reject(Plant(workspace, ledger), again, "bob", "")
    assert "is release 1 already" in person.says(version, approval="rejected")[0]


def test_forged_approvals_are_refused_by_name(workspace: Workspace, ledger: Ledger, person: Person) -> None:
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
        forged(export_sha256="0" * 64): "is of another export than that of candidate 2",
        forged(): "candidate 2 is version 2, not version 4",
        forged(candidate="77"): "no candidate 77",
        forged(candidate="2; DROP TABLE releases"): "no candidate 0",
        forged(candidate="1"): "is of another export than that of candidate 1",
    }
    person.says("1", approval="approved")
    for version, why in expected.items():
        assert why in person.reads(version) and person.reads(version, "approval") == "refused", version
    assert "'yes, please' is no answer" in person.says("2", approval="Yes, please")[0]
    assert ReleaseRow.select(ledger) == [] and said_in(ledger, "approved") == []
    assert len(said_in(ledger, "approval_refused")) == len(expected) + 1

    # Judged again since its reader looked: MLflow still shows the older verdict.
    add_verdict(ledger, waits)
    assert (
        "verdict 2 on candidate:2 is out of date: verdict 3 says 'promote'" in person.says("2", approval="approved")[0]
    )
    register_candidate(Plant(workspace, ledger), waits)
    assert person.reads("2", "approval") == "pending"
    # A word that came before MLflow showed the new verdict is about the older one.
    person.client.set_model_version_tag(MODEL, "2", "approval", "approved")
    add_verdict(ledger, waits)
    reconcile(Plant(workspace, ledger))
    assert person.reads("2", "approval") == "pending" and person.answers.look() == []
    # The export on disk is another one; the ledger's row was changed with it.
    (workspace.exports / "candidate-2" / "config.json").write_text("{}")
    assert "is not what was recorded" in person.says("2", approval="approved")[0]
    with ledger.begin() as tx:
        tx.execute(candidates.update().where(candidates.c.id == waits).values(export_sha256="1" * 64))
    assert "is of another export" in person.says("2", approval="approved")[0]
    assert ReleaseRow.select(ledger) == []


def test_it_is_answered_while_the_main_thread_works(workspace: Workspace, ledger: Ledger, person: Person) -> None:
    """A thread of its own, an own ledger: as in the daemon, which trains for hours. An error of MLflow ends nothing."""
    add_verdict(ledger, add_candidate(workspace, ledger))
    version = register_candidate(Plant(workspace, ledger), 1)
    said = Said()
    answers = ApprovalAnswers(Plant(workspace, Ledger.open(workspace.ledger_url), said))
    database = workspace.root / "mlflow.db"
    away = database.rename(database.with_name("away.db"))
    database.write_bytes(b"no database " * 100)
    with in_background(Plant(workspace, ledger, said), "answering approvals", 0.05, answers.look_and_ask):
        until(lambda: said.about("Training and releases go on") and said.about("candidate 1 waits for approval"))
        away.rename(database)
        person.client.set_model_version_tag(MODEL, version, "approval", "approved")
        until(
            lambda: person.reads(version).startswith("released as 1") and champion(ledger)
        )  # the answer stands once it is decided
    assert said.about("answers again")
    row = champion(ledger)
    assert row and row.approved_by == "mlflow"


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_status_says_what_waits_and_how_to_answer(workspace: Workspace, ledger: Ledger) -> None:
    for _ in range(2):
        add_verdict(ledger, add_candidate(workspace, ledger))
    found = waiting(workspace, Reader(workspace))
    assert [one["what"] for one in found] == [f"candidate {n}, promoted, to be released" for n in (1, 2)]
    assert found[0]["command"] == "factory releases approve 1, or factory releases reject 1 --why …"
