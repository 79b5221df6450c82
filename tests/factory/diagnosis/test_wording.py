"""A language model describes a recorded diagnosis. Its text is checked before it is shown. Whatever an endpoint does, nothing else changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml
from typer.testing import CliRunner

from agents.llm.policy import LlmPolicy
from factory.cli.app import app
from factory.core.workspace import Workspace
from factory.diagnosis.diagnosing import diagnose_and_act
from factory.diagnosis.remedies import apply_anomaly_policy
from factory.diagnosis.wording import describe_waiting_diagnoses, make_diagnosis_facts
from factory.gates.release.anomaly_policy import AnomalyPolicy
from factory.ledger.anomalies import (
    DIAGNOSED,
    EXPLAINED,
    find_explanation,
    find_next_unexplained_episode,
    read_newest_details_by_anomaly,
)
from factory.ledger.ledger import Ledger, agent_runs, anomalies, exchanges, record_event
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, Subject
from factory.show.mlflow.runs import CLOSED, DIAGNOSIS_SHOWN
from factory.show.unshown_items import show_unshown_items
from tests.support.factory.code_loop import make_target
from tests.support.factory.engineer import recorded
from tests.support.factory.errands import do, next_due
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.plants.trained_plant import make_plant
from tests.support.replay_server import Answer, RecordedSession, ReplayServer

HOSTILE = "<script>alert(1)</script></data> name hardware\u202e\x1b[2J " + "x" * 5000


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, Ledger]:
    root = tmp_path_factory.mktemp("words")
    return make_plant(root, make_target(root / "target"))


@pytest.fixture
def made(plant: tuple[Workspace, Ledger], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Workspace, Ledger]]:
    """The plant without an endpoint, and without waiting diagnoses of other tests."""
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    configure(plant[0])
    yield plant
    configure(plant[0])
    describe_waiting_diagnoses(Plant(*plant))


def configure(workspace: Workspace, url: str = "", **llm: Any) -> None:
    settings = {"endpoint": url, "model": "replay", "diagnosis_seconds": 20.0} | llm
    shipped = yaml.safe_load((ROOT / "policies" / "agents.yaml").read_text())
    (workspace.root / "policies" / "agents.yaml").write_text(yaml.safe_dump(shipped | {"llm": settings}))


def diagnosed(workspace: Workspace, ledger: Ledger, step: int = 12) -> int:
    """A recorded diagnosis that waits for a description: a spike that a smaller rate removes."""
    with ledger.begin() as tx:
        spike = anomalies.insert().values(segment=1, step=step, kind="loss_spike", detail={}).returning(anomalies.c.id)
        number = int(tx.execute(spike).scalar_one())
    keys = [row["key"] for row in ledger.read("SELECT key FROM documents WHERE fate = 'train' ORDER BY key LIMIT 3")]
    arms = [("same again", True, 4), ("fp32", True, 4), ("rate × 0.1", False, 19)]
    detail = {
        "causes": ["rate"], "why": "no document is to blame", "guilty": [], "triggers": keys, "suspects": keys, "steps": 27,
        "remedy": "rate × 0.1", "anomalies": [number], "segment": 1, "kind": "loss_spike", "onset": step, "last": step,
        "budget": 1000, "override": {"keys": {"optimizer.lr": 0.001}, "until": 40}, "to_word": True, "undo": [],
        "arms": [{"arm": arm, "fires": fires, "steps": steps, "failed": ""} for arm, fires, steps in arms],
    }  # fmt: skip
    detail |= {"report": f"reports/anomaly-{number}.html", "drawn": {"loss": {}, "grad_norm": {}}}
    with ledger.begin() as tx:
        record_event(tx, DIAGNOSED, Subject("anomaly", number), detail)
    apply_anomaly_policy(ledger, AnomalyPolicy(), number)
    return number


@pytest.fixture(autouse=True)
def live_loss(monkeypatch: pytest.MonkeyPatch, plant: tuple[Workspace, Ledger]) -> None:
    """Set the loss in the segment's metrics to 3.25, and to 9.5 from step 12 on."""
    path = Path(SegmentRow.get(plant[1], 1).folder) / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["loss"] = 3.25 if line["step"] < 12 else 9.5
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def ledger_but_words(ledger: Ledger) -> dict[str, Any]:
    """All rows that a description must not change."""
    tables = ("documents", "segments", "anomalies", "verdicts", "proposals", "releases", "candidates")
    found: dict[str, Any] = {table: ledger.read(f"SELECT * FROM {table}") for table in tables}
    kinds = (EXPLAINED, DIAGNOSIS_SHOWN, CLOSED, "agent_began", "agent_worded", "agent_nothing", "agent_abandoned")
    return found | {"events": [r for r in ledger.read("SELECT * FROM events ORDER BY id") if r["kind"] not in kinds]}


def page_of(workspace: Workspace, ledger: Ledger, number: int) -> str:
    show_unshown_items(Plant(workspace, ledger))
    return (workspace.reports / f"anomaly-{number}.html").read_text()


def show(workspace: Workspace, number: int) -> str:
    return CliRunner().invoke(app, ["anomalies", "show", str(number), "--workspace", str(workspace.root)]).output


def test_without_an_endpoint_no_model_is_asked_and_the_page_says_so(made: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = made
    with ledger.begin() as tx:
        number = tx.execute(
            anomalies.insert().values(segment=1, step=3, kind="loss_spike", detail={}).returning(anomalies.c.id)
        ).scalar_one()
    diagnose_and_act(Plant(workspace, ledger), number)
    assert find_next_unexplained_episode(ledger) is None and find_explanation(ledger, number) is None
    assert "No language model was asked" in page_of(workspace, ledger, number)
    assert "No language model was asked" in show(workspace, number)
    assert not ledger.select_rows(sa.select(exchanges))


def test_a_good_answer_is_shown_with_its_evidence_and_a_false_claim_is_dropped(
    made: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = made
    number = diagnosed(workspace, ledger)
    before = ledger_but_words(ledger)
    assert "has not asked a language model" in page_of(
        workspace, ledger, number
    ) and "has not asked a language model" in show(workspace, number)
    with ReplayServer(recorded("doctor")) as server:
        configure(workspace, server.url)
        assert next_due(Plant(workspace, ledger)) == f"word {number}"
        do(Plant(workspace, ledger), f"word {number}")
        describe_waiting_diagnoses(Plant(workspace, ledger))
        assert len(server.requests) == 1 and find_next_unexplained_episode(ledger) is None
    said = find_explanation(ledger, number)
    assert said is not None and not said["failed"] and len(said["dropped"]) == 7
    assert [(c["rests_on"], c["shows"]) for c in said["claims"]] == [
        ("rate × 0.1", "gone"), ("loss", "3.25 before the anomaly, 9.5 at the largest deviation"),
    ]  # fmt: skip
    # It named other causes, documents and another remedy: nothing of the record is another.
    assert ledger_but_words(ledger) == before and read_newest_details_by_anomaly(ledger, DIAGNOSED)[number][
        "causes"
    ] == ["rate"]
    for shown in (page_of(workspace, ledger, number), show(workspace, number)):
        assert said["claims"][0]["says"] in shown and said["claims"][0]["says"].startswith("With a tenth of the rate")
        assert "--agent recipe-scout --target optimizer.lr" in shown and "optimizer.lr 0.001" in shown
        assert "left out 7 of 9 sentences" in shown and "has not asked a language model" not in shown
        for other in ("everything", "bad data", "disk", "alert(1)", "\x1b", "\u202e"):
            assert other not in shown.partition("Documents")[0], other
    assert "[rate × 0.1: gone]" in show(workspace, number)


def test_documents_reach_the_model_only_if_the_policy_allows_them(
    made: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = made
    for count in (0, 2):
        number = diagnosed(workspace, ledger)
        keys = read_newest_details_by_anomaly(ledger, DIAGNOSED)[number]["triggers"]
        names = [ledger.read("SELECT id FROM documents WHERE key = :key", key=key)[0]["id"] for key in keys]
        with ReplayServer(recorded("doctor")) as server:
            configure(workspace, server.url, diagnosis_documents=count)
            describe_waiting_diagnoses(Plant(workspace, ledger))
        asked = server.requests[0]["messages"][1]["content"]
        assert asked.count("the beginning of a document") == count and len(asked) < 8000
        assert sum(name in asked for name in names) == count
    detail = read_newest_details_by_anomaly(ledger, DIAGNOSED)[number]
    facts = make_diagnosis_facts(detail, [], [{"id": HOSTILE, "domain": "code", "source": HOSTILE, "text": HOSTILE}])
    assert (
        facts.documents and facts.look_up_fact(facts.documents[0][0]) is None
    )  # no sentence can rest on what a document says


@pytest.mark.parametrize(
    ("session", "llm", "why"),
    [
        ([Answer(hang=60)], {"diagnosis_seconds": 1.0}, "no byte for 0.5 s"),
        ([Answer(endless="and then ")], {"diagnosis_seconds": 2.0}, "cut off"),
        ([Answer(status=429, headers={"Retry-After": "1"})], {}, "busy"),
        ([Answer(status=500, text="<b>oh</b>\x1b[2J")], {}, "the server failed (500: <b>oh</b>\ufffd[2J)"),
        ([Answer(text="It is the rate.")], {}, "not JSON"),
        ([Answer(text="unasked")], {"per_diagnosis": {"tokens": 100, "usd": 1.0}}, "budget of this diagnosis"),
        ([Answer(text="unasked")], {"per_day": {"tokens": 100, "usd": 1.0}}, "budget of today"),
        ([Answer(text="unasked")], {"model": ""}, "no model is set"),
        ([Answer(text="unasked")], {"modle": "x"}, "did you mean 'model'"),
        ([Answer(text="unasked")], {"endpoint": "files:"}, "names no folder"),
    ],
)
def test_a_failing_endpoint_changes_nothing_and_is_asked_at_most_once(
    made: tuple[Workspace, Ledger], session: list[Any], llm: dict[str, Any], why: str
) -> None:
    workspace, ledger = made
    number = diagnosed(workspace, ledger)
    before = ledger_but_words(ledger)
    with ReplayServer(RecordedSession(turns=session)) as server:
        configure(workspace, server.url, **llm)
        describe_waiting_diagnoses(Plant(workspace, ledger))
        assert find_next_unexplained_episode(ledger) is None and len(server.requests) == ("unasked" not in str(session))
    said = find_explanation(ledger, number)
    assert said is not None and why in said["failed"] and not said["claims"], said
    assert ledger_but_words(ledger) == before
    page = page_of(workspace, ledger, number)
    assert "but gave none:" in page and "<b>" not in page and "no document is to blame" in page
    assert why.partition("<")[0] in show(workspace, number)


WORD = """
import sys
from pathlib import Path
from factory.core.workspace import Workspace
from factory.diagnosis.wording import describe_waiting_diagnoses
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
workspace = Workspace.open(Path(sys.argv[1]))
describe_waiting_diagnoses(Plant(workspace, Ledger.open(workspace.ledger_url)))
"""


def test_after_a_kill_the_model_is_asked_once_more(made: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = made
    number = diagnosed(workspace, ledger)
    good = recorded("doctor").turns[0]
    assert isinstance(good, Answer)
    with ReplayServer(RecordedSession(turns=[[Answer(hang=600), good]])) as server:
        configure(workspace, server.url, diagnosis_seconds=600.0)
        words = [sys.executable, "-c", WORD, str(workspace.root)]
        killed = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": str(ROOT)})
        deadline = time.monotonic() + PATIENCE_S
        while not server.requests:
            assert killed.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        killed.kill()
        killed.wait()
        assert find_next_unexplained_episode(ledger) == number
        describe_waiting_diagnoses(Plant(workspace, ledger))
        assert find_next_unexplained_episode(ledger) is None and len(server.requests) == 2
    said = find_explanation(ledger, number)
    assert said is not None and len(said["claims"]) == 2 and not said["failed"]
    (run,) = ledger.select_rows(sa.select(agent_runs).where(agent_runs.c.asked == f"diagnosis:{said['diagnosis']}"))
    assert run["state"] == "worded"
    spent = ledger.select_rows(sa.select(exchanges).where(exchanges.c.run == run["id"]).order_by(exchanges.c.id))
    assert [row["state"] for row in spent] == [
        "reserved",
        "done",
    ]  # what the killed request may have cost counts in full


def test_after_two_kills_the_model_is_never_asked_again(made: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = made
    number = diagnosed(workspace, ledger)
    event, commit = (
        read_newest_details_by_anomaly(ledger, DIAGNOSED)[number]["event"],
        SegmentRow.get(ledger, 1).code_commit,
    )
    left = {"agent": "loss-doctor", "asked": f"diagnosis:{event}", "base_commit": commit, "profile": 0}
    with ledger.begin() as tx:  # as two killed processes leave it
        agent_runs.create(tx, checkfirst=True)
        exchanges.create(tx, checkfirst=True)
        run = tx.execute(agent_runs.insert().values(**left, state="running", created_at=time.time()))
        for _ in range(2):
            entry = {"at": time.time(), "run": run.inserted_primary_key[0], "label": "x", "state": "reserved"}
            tx.execute(exchanges.insert().values(**entry, tokens=1, usd=0.0))
    with ReplayServer(recorded("doctor")) as server:
        configure(workspace, server.url)
        describe_waiting_diagnoses(Plant(workspace, ledger))
        assert not server.requests and find_next_unexplained_episode(ledger) is None
    assert "killed each time" in find_explanation(ledger, number)["failed"]  # type: ignore[index]


def test_a_diagnosis_is_described_again_only_when_it_is_made_again(made: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = made
    number = diagnosed(workspace, ledger)
    with ReplayServer(recorded("doctor")) as server:
        configure(workspace, server.url)
        describe_waiting_diagnoses(Plant(workspace, ledger))
        detail = read_newest_details_by_anomaly(ledger, DIAGNOSED)[number]
        with ledger.begin() as tx:
            record_event(tx, DIAGNOSED, Subject("anomaly", number), {k: v for k, v in detail.items() if k != "event"})
        assert find_explanation(ledger, number) is None and find_next_unexplained_episode(ledger) == number
        describe_waiting_diagnoses(Plant(workspace, ledger))
        assert len(server.requests) == 2 and find_explanation(ledger, number) is not None


def test_the_limits_of_diagnosis_cap_the_other_limits_of_the_policy() -> None:
    found = LlmPolicy(attempts=20, diagnosis_seconds=100.0).with_diagnosis_limits()
    assert (found.attempts, found.reply_seconds + found.silence_seconds, found.file_wait_seconds) == (1, 100.0, 100.0)
    assert LlmPolicy(reply_seconds=5.0).with_diagnosis_limits().reply_seconds == 5.0
