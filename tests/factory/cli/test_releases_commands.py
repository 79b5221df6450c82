"""``factory releases`` on a real ledger and a real MLflow store."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import factory.cli  # noqa: F401 (registers every command)
from factory.cli.app import app
from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, eval_items, evaluations, segments, token_shards, verdicts
from factory.ledger.plant import Plant
from factory.ledger.rows import find_champion
from factory.show.mlflow.registry import MODEL
from factory.show.mlflow.store import open_client
from factory.show.pages.release_facts import compare_releases, list_releases, read_release_details
from tests.support.factory.command import factory
from tests.support.factory.shown import release
from tests.support.messages import refused
from tests.support.plants.release_scene import add_candidate, add_shard, add_verdict, approval, with_store

SOURCES = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Release 1; candidate 2, measured on the same items and better in code alone, waits for approval; candidate 3 is held.

    Each test has a copy.
    """
    workspace = with_store(Workspace.create(tmp_path_factory.mktemp("made") / "workspace"))
    ledger = Ledger.create(workspace.ledger_url)
    approval(workspace, "manual")
    add_shard(ledger)
    for number in (1, 2, 3):
        assert add_candidate(workspace, ledger) == number
    release(Plant(workspace, ledger), add_verdict(ledger, 1), approved_by="ada")
    verdict = add_verdict(ledger, 2, against=1)
    add_verdict(ledger, 3, "hold", against=1)
    measured = {"gain": 0.2, "error": 0.01, "clusters": SOURCES, "effective": float(SOURCES)}
    guards = {"code": measured, "docs": measured | {"gain": -0.1}, "chat": measured | {"gain": 0.001}}
    with ledger.begin() as tx:
        tx.execute(
            verdicts.update().where(verdicts.c.id == verdict).values(evidence={"target": measured, "guards": guards})
        )
        recipe = {"name": "demo", "precision": "fp32", "model": {"d_model": 96, "layers": 2}, "phases": [0.5, 0.5]}
        tx.execute(segments.update().where(segments.c.id == 2).values(recipe_json=recipe, last_step=180))
        for evaluation, change in ((1, 0.0), (2, -0.2)):
            tx.execute(eval_items.delete().where(eval_items.c.evaluation == evaluation))
            for index in range(SOURCES):
                for domain in ("code", "docs"):
                    nats = 50 + index + (change if domain == "code" else 0.0) * 100 * math.log(2)
                    item = {"task": "bpb", "item": f"{domain}:{index}", "domain": domain, "cluster": f"source {index}"}
                    tx.execute(eval_items.insert().values(evaluation=evaluation, **item, value=nats, weight=100.0))
    ledger.engine.dispose()
    return workspace.root


@pytest.fixture
def workspace(made: Path, tmp_path: Path) -> Workspace:
    return Workspace.open(shutil.copytree(made, tmp_path / "workspace", symlinks=True))


@pytest.fixture
def scene(workspace: Workspace) -> Ledger:
    return Ledger.open(workspace.ledger_url)


def run(workspace: Workspace, *words: str) -> str:
    """In this process: another one would spend seconds on importing MLflow."""
    done = CliRunner().invoke(app, ["releases", *words, "-w", str(workspace.root)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def read(workspace: Workspace, *words: str) -> Any:
    return json.loads(run(workspace, *words, "--json"))


def test_options_of_a_bundle_without_bundle_release_nothing(workspace: Workspace, scene: Ledger) -> None:
    """Candidate 2 waits for an approval, and ``factory release`` would give it."""
    for words, code, data in (
        (["--data", "--traces"], "no_bundle_number", {}),
        (["--licence", "MIT"], "no_bundle_number", {}),
        (["2", "--rollback", "1"], "several_asked", {"options": "CANDIDATE and --rollback"}),
        (["--rollback", "1", "--bundle", "1"], "several_asked", {"options": "--rollback and --bundle"}),
    ):
        done = CliRunner().invoke(app, ["release", *words, "-w", str(workspace.root)])
        assert isinstance(done.exception, InputError)
        with refused(f"model_loop.{code}", **data):
            raise done.exception
    best = find_champion(scene)
    assert best is not None and best.number == 1 and len(list_releases(scene)) == 3


def test_the_list_has_releases_and_waiting_candidates(workspace: Workspace, scene: Ledger) -> None:
    rows = list_releases(scene)
    assert [(row["release"], row["candidate"], row["state"], row["champion"]) for row in rows] == [
        (1, 1, "published", True), (None, 2, "waits for approval", False), (None, 3, "held", False),
    ]  # fmt: skip
    gain = rows[1]["gain"]
    assert gain["shows"] == "better" and 0.17 < gain["low"] < gain["gain"] == 0.2 < gain["high"] < 0.23
    assert rows[0]["approved_by"] == "ada" and rows[2]["verdict"] == "hold"
    done = factory("releases", "list", "-w", str(workspace.root))
    assert done.returncode == 0 and "'factory releases show c2'" in done.stdout
    assert "'factory releases approve 2'" in done.stdout and "approve 3" not in done.stdout
    assert done.stdout.splitlines()[0].rstrip().endswith("champion")


def test_releases_show_prints_gains_losses_and_the_training_data(workspace: Workspace, scene: Ledger) -> None:
    found = read_release_details(Plant(workspace, scene), "c2")
    assert {name: gain["shows"] for name, gain in found["measured"].items()} == {
        "target": "better", "code": "better", "docs": "worse", "chat": "no difference shown",
    }  # fmt: skip
    assert [shard["name"] for shard in found["shards"]] == ["code-00.jsonl"] and found["serve"] is None
    assert read_release_details(Plant(workspace, scene), "1")["serve"] == "factory serve"
    said = run(workspace, "show", "1")
    for words in (
        "release 1: candidate 1, published, champion",
        "approved by ada",
        "candidate-1.html",
        "factory serve",
    ):
        assert words in said


def test_releases_diff_compares_on_the_same_items_or_warns(workspace: Workspace, scene: Ledger) -> None:
    with scene.begin() as tx:
        plan = {
            "token_shards": [
                {"id": "t" * 64, "path": "x", "generation": 1},
                {"id": "u" * 64, "path": "y", "generation": 2},
            ]
        }
        tx.exec_driver_sql("INSERT INTO data_plans (id, plan, created_at) VALUES ('q', ?, 1.0)", (json.dumps(plan),))
        tx.execute(segments.update().where(segments.c.id == 2).values(data_plan="q"))
    add_shard_of(scene, "v" * 64, "u" * 64, "new.jsonl")
    found = compare_releases(Plant(workspace, scene), "1", "c2")
    gains = found["measured"]["gains"]
    assert (
        found["measured"]["same_items"]
        and gains["code"]["gain"] == pytest.approx(0.2)
        and gains["code"]["shows"] == "better"
    )
    assert gains["docs"]["gain"] == pytest.approx(0.0)
    assert found["recipe"] == {"model.d_model": [64, 96]} and found["steps"] == [100, 180]
    assert found["data"]["added"] == ["new.jsonl"] and found["data"]["left_out"] == []
    back = compare_releases(Plant(workspace, scene), "c2", "1")
    assert back["data"]["left_out"] == ["new.jsonl"] and back["measured"]["gains"]["code"]["shows"] == "worse"
    with scene.begin() as tx:
        tx.execute(evaluations.update().where(evaluations.c.id == 2).values(suite_sha256="f" * 64))
    assert not compare_releases(Plant(workspace, scene), "1", "c2")["measured"]["gains"]
    assert "different held-out items" in run(workspace, "diff", "1", "c2")


def add_shard_of(ledger: Ledger, sha256: str, token_shard: str, name: str) -> None:
    with ledger.begin() as tx:
        tx.exec_driver_sql(
            "INSERT INTO shards SELECT ?, ?, path, bytes, state, reason, rows, counts, domains, tokens, ingested_at FROM shards LIMIT 1",
            (sha256, name),
        )
        row = dict(tx.execute(token_shards.select()).mappings().first() or {})
        tx.execute(token_shards.insert().values(row | {"id": token_shard, "shard": sha256}))


def test_a_candidate_is_rejected_approved_and_rolled_back_by_command(
    workspace: Workspace, scene: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USER", "bob")
    add_verdict(scene, 3, against=1)
    assert read(workspace, "reject", "3", "--why", "it swears")["rejected_by"] == "bob"
    tags = open_client(workspace).get_model_version(MODEL, "3").tags
    assert (tags["candidate"], tags["approval"], tags["approval_answer"]) == (
        "3",
        "rejected",
        "rejected by bob: it swears",
    )
    assert [row["state"] for row in list_releases(scene)] == ["published", "waits for approval", "rejected"]
    with pytest.raises(InputError, match="was rejected by bob: it swears"):
        run(workspace, "approve", "3")
    done = read(workspace, "approve", "2")
    assert done == {"release": 2, "candidate": 2, "champion": True, "approved_by": "bob"}
    assert read(workspace, "rollback") == {"champion": 1}
    with pytest.raises(InputError, match="release 1 replaced no other"):
        run(workspace, "rollback")
    assert read(workspace, "rollback", "2") == {"champion": 2} and read(workspace, "rollback", "1") == {"champion": 1}
    best = find_champion(scene)
    assert best and best.number == 1
    assert [row["champion"] for row in read(workspace, "list")] == [True, False, False]


def test_an_unknown_or_unfit_release_is_an_error_that_names_it(workspace: Workspace, scene: Ledger) -> None:
    for words, said in (
        (["show", "9"], "no release 9. The ledger has: 1"),
        (["show", "c9"], "no candidate 9. The ledger has: 1, 2, 3"),
        (["show", "x;y"], "'x;y' is neither a release"),
        (["diff", "1", "²"], "'²' is neither a release"),
        (["approve", "3"], "'hold', not 'promote'"),
        (["reject", "3"], "'hold', not 'promote'"),
        (["rollback", "4"], "no release 4"),
    ):
        with pytest.raises(InputError) as wrong:
            run(workspace, *words)
        assert said in str(wrong.value)
