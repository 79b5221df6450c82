"""A real daemon trains on a poisoned shard, finds the shard and releases a clean model, without the help of a person."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from factory.gates.release.anomaly_policy import AnomalyPolicy
from factory.ledger.anomalies import (
    DOCUMENTS_QUARANTINED,
    RELEASE_MARKED,
    SEGMENT_REWOUND,
    list_anomalies,
    list_open_anomalies_of_lineage,
)
from factory.ledger.reader import LedgerReader
from factory.ledger.rows import ReleaseRow, SegmentRow
from factory.training.planning import read_data_plan
from tests.support.factory.code_loop import make_target
from tests.support.factory.command import Running
from tests.support.patience import PATIENCE_S
from tests.support.plants.trained_plant import WORDS, make_plant
from tests.support.stopping import left_of, started_by

SETTINGS = {
    "optimizer": {"lr": 5e-3},
    "stability": {"window": 16, "spike_deviations": 6.0, "noise_scale_every": 5},
    "schedule": {"warmup_steps": 4, "trunk_steps": {"first": 24, "later": 12}, "anneal_steps": 12},
}
# Each document of the shard is one piece, and a bad one has as many tokens as the good one in its place (22), so that the order of the
# documents depends on how many there are alone: the trunk goes on with steps 24 to 35, and step 40, the fifth of the anneal, draws these two.
BAD = (38, 60)


def write_poison(path: Path) -> None:
    """A shard of 240 short documents, of which those two are random letters."""
    rng = random.Random(3)
    call = lambda: f"{rng.choice(WORDS)}_{rng.randint(0, 999)} = {rng.choice(WORDS)}({rng.randint(0, 9999)})"
    rows = []
    for i in range(240):
        good = f"def {rng.choice(WORDS)}_{i}(value):\n    {call()}"
        letters = "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=22))[
            :21
        ]  # more is drawn than used: it fixes what follows
        name = f"{'bad' if i in BAD else 'new'}/{i}"
        rows.append({"id": name, "text": letters if i in BAD else good, "domain": "code", "source": f"new/{i}"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow("a daemon trains on a poisoned shard: five segments, three candidates, and a dozen sandboxed replays")
def test_the_daemon_finds_and_quarantines_a_poisoned_shard_without_help(tmp_path: Path) -> None:
    workspace, ledger = make_plant(tmp_path, make_target(tmp_path / "target"), **SETTINGS)
    # Of seven held-out documents of a domain, no bound is so far out as four guards at 5 % ask for.
    gate = workspace.policy_path("gates/release.yaml")
    gate.write_text(gate.read_text() + "guards: {alpha: 0.2}\n")
    rules = workspace.policy_path("data.yaml")
    rules.write_text(
        rules.read_text().replace("    max_chars: 1000000", "    min_chars: 20\n    max_chars: 1000000", 1)
    )
    read, log = LedgerReader(workspace).read, workspace.logs / "daemon.log"
    daemon = Running("run", "--workspace", str(workspace.root), log=log)
    deadline = time.monotonic() + PATIENCE_S

    def wait_for(rows: int, query: str) -> None:
        while len(read(query)) < rows:
            assert daemon.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)

    try:
        # The daemon runs: while it trains the first anneal the shard comes, and so joins the next trunk segment.
        wait_for(1, "SELECT id FROM segments WHERE kind = 'anneal'")
        write_poison(workspace.inbox / "poison.jsonl")
        wait_for(3, "SELECT id FROM verdicts WHERE gate = 'release'")
        if len(read("SELECT id FROM verdicts WHERE gate = 'release' AND outcome = 'promote'")) == 2:
            wait_for(2, "SELECT number FROM releases WHERE state = 'published'")
    finally:
        started = [*started_by(daemon.pid)]
        daemon.terminate()
        daemon.wait()
    assert not left_of(started)
    said = log.read_text()

    verdicts = read("SELECT subject, outcome, reasons FROM verdicts WHERE gate = 'release' ORDER BY id")
    assert [(row["subject"], row["outcome"]) for row in verdicts] == [
        ("candidate:1", "promote"),
        ("candidate:2", "hold"),
        ("candidate:3", "promote"),
    ], said
    first, other, spoiled, again = SegmentRow.select(ledger, "WHERE id > 1 ORDER BY id")[:4]
    assert [(row.kind, row.state) for row in (first, other, spoiled, again)] == [
        ("anneal", "done"), ("trunk", "done"), ("anneal", "rewound"), ("anneal", "done"),
    ], said  # fmt: skip
    assert spoiled.parent == again.parent == other.id and spoiled.first_step == again.first_step
    assert any(f"segment {spoiled.id} was rewound" in reason for reason in verdicts[1]["reasons"])

    bad = {f"bad/{i}" for i in BAD}
    quarantined = read("SELECT key, id, rule FROM documents WHERE fate = 'quarantined'")
    assert {row["id"] for row in quarantined} == bad and {row["rule"] for row in quarantined} == {"loss_doctor"}
    named = [row for row in list_anomalies(ledger) if row["segment"] == spoiled.id and row["how"] == "quarantined"]
    assert named and all(row["causes"] == ["bad data"] for row in named), list_anomalies(ledger)
    assert not read_data_plan(ledger, spoiled).get("masked")
    assert read_data_plan(ledger, again)["masked"] == sorted(row["key"] for row in quarantined)
    assert not list_open_anomalies_of_lineage(ledger, again.id, AnomalyPolicy().kinds)
    page = next(workspace.reports.glob("anomaly-*.html")).read_text()
    assert "bad data" in page and "bad/" in page and "<svg" in page

    assert [row.candidate for row in ReleaseRow.select(ledger, "ORDER BY number")] == [1, 3], said
    events = [row["kind"] for row in read("SELECT kind FROM events ORDER BY id")]
    assert (
        DOCUMENTS_QUARANTINED in events and SEGMENT_REWOUND in events and RELEASE_MARKED not in events
    )  # release 1 never saw them
    by = {row["detail"]["by"] for row in read("SELECT detail FROM events WHERE kind = 'anomaly_closed'")}
    assert by == {"policy"}  # nobody lent a hand
