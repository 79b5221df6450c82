"""Prepares the start of each scenario, on the site that another scenario left. Effects are not counted yet."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import yaml

from factory.ledger.plant import Plant
from tests.support.git import git
from tests.support.paths import ROOT

NOTED = "noted"  # an event
FIRST, SECOND = (
    ("code/0-5", "chat/0-7"),
    ("code/0-8", "docs/0-9", "docs/1-4"),
)  # documents whose text is erased; two removals have documents of one shard


def opened(site: Path):  # type: ignore[no-untyped-def]
    from factory.core.workspace import Workspace
    from factory.ledger.ledger import Ledger

    workspace = Workspace.open(site / "plant")
    return workspace, Ledger.open(workspace.ledger_url)


def checkout(site: Path) -> None:
    from factory.git.repository import checkout_live_code

    checkout_live_code(opened(site)[0])


def store(site: Path) -> None:
    from factory.show.mlflow.store import open_client

    open_client(opened(site)[0])


def empty_plant(site: Path) -> None:
    """Make a workspace with two shards in the inbox and a release policy whose floors a second of training reaches."""
    import random
    import shutil

    from factory.core.workspace import Workspace, WorkspaceConfig
    from factory.demo.demo import use_plain_kernels
    from factory.ledger.ledger import Ledger
    from tests.support.plants.trained_plant import write_lenient_policies, write_shards

    target = site / "target"
    for name in ("kernels", "models", "trainer", "policies"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    (target / "agents").mkdir()
    (target / "agents" / "__init__.py").write_text("")
    kernels = target / "policies" / "kernels.yaml"
    kernels.write_text(use_plain_kernels(kernels.read_text()))
    git(site, "init", "-q", "-b", "main", "--template=", str(target))
    git(target, "add", "-A")
    git(target, "commit", "-q", "-m", "base")
    config = WorkspaceConfig(recipe="tiny", repository=str(target), training_sandbox="off", ranks=1)
    workspace = Workspace.create(site / "plant", config)
    Ledger.create(workspace.ledger_url)
    write_lenient_policies(workspace, model={"d_model": 32, "layers": 2})
    random.seed(11)
    write_shards(workspace.inbox)
    (workspace.inbox / "bad.jsonl").write_text('{"text": \n' * 8)


def with_checkout_and_store(site: Path) -> None:
    """Make the results of the scenarios ``checkout`` and ``store``, and the compiled loss head."""
    from tests.support.lent_libraries import lend

    checkout(site)
    store(site)
    lend(opened(site)[0])


def with_proposal(site: Path) -> None:
    """Add a proposal that the gate promotes, with one changed and one new file."""
    from factory.core.workspace import find_checkout_root
    from factory.git import repository
    from factory.git.scope import AgentsPolicy
    from factory.ledger.ledger import proposals
    from factory.ledger.rows import Subject
    from factory.ledger.writing import record_verdict
    from factory.show.mlflow.runs import MlflowTracking

    workspace, ledger = opened(site)
    target = workspace.repository
    base = repository.get_live_commit(target)
    edits = {"kernels/rms_norm/note.py": '"""A note."""\n', "trainer/tools/__init__.py": '"""Tools, changed."""\n'}
    applied = repository.apply_proposal(
        target, base, edits.items(), policy=AgentsPolicy.load(find_checkout_root() / "policies" / "agents.yaml"),
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
    MlflowTracking.open(Plant(workspace, ledger)).update_proposal_run(1)


def with_anomaly(site: Path) -> None:
    """Add an anomaly without a diagnosis, and a budget for the first replays."""
    from factory.ledger.ledger import anomalies

    workspace, ledger = opened(site)
    policy = yaml.safe_load((ROOT / "policies" / "anomalies.yaml").read_text())
    (workspace.root / "policies" / "anomalies.yaml").write_text(yaml.safe_dump(policy | {"steps": 12}))
    with ledger.begin() as tx:
        tx.execute(anomalies.insert().values(id=1, segment=1, step=17, kind="loss_spike", detail={}))


def with_diagnosis(site: Path) -> None:
    """Add an anomaly whose diagnosis blames a document. Nothing was done about it yet."""
    from factory.ledger.anomalies import DIAGNOSED
    from factory.ledger.ledger import anomalies, record_event
    from factory.ledger.rows import Subject

    _, ledger = opened(site)
    key = ledger.read("SELECT key FROM documents WHERE fate = 'train' ORDER BY key")[0]["key"]
    blamed = {
        "anomalies": [1], "segment": 1, "kind": "loss_spike", "onset": 12, "noted": [12, 12], "last": 12, "causes": ["poisoned_document"],
        "guilty": [key], "triggers": [key], "why": "so it was", "arms": [], "report": "", "undo": [], "override": None,
    }  # fmt: skip
    with ledger.begin() as tx:
        tx.execute(anomalies.insert().values(id=1, segment=1, step=12, kind="loss_spike", detail={}))
        record_event(tx, DIAGNOSED, Subject("anomaly", 1), blamed)


def with_manual_approval(site: Path) -> None:
    """Set the policy so that a person must approve each release."""
    policy = site / "plant" / "policies" / "gates" / "release.yaml"
    policy.write_text(yaml.safe_dump(yaml.safe_load(policy.read_text()) | {"approval": "manual"}))


def with_word_in_mlflow(site: Path) -> None:
    """Set the tag of an approval in MLflow that the factory has not read yet."""
    from factory.show.mlflow.registry import MODEL
    from factory.show.mlflow.runs import APPROVAL_TAG
    from factory.show.mlflow.store import open_client

    open_client(opened(site)[0]).set_model_version_tag(MODEL, "1", APPROVAL_TAG, "approved")


def remove(site: Path, *names: str) -> None:
    """Do what ``factory data remove --erase`` does after the person's confirmation."""
    from factory.data.removing import apply_removal as record_removal
    from factory.data.removing import plan_removal
    from factory.data.selecting import list_removable_fates, select_documents_by_name
    from factory.erasing.erasing import finish_pending_removals

    workspace, ledger = opened(site)
    found = plan_removal(ledger, select_documents_by_name(ledger, names, list_removable_fates(True)), True)
    record_removal(ledger, found, "ada", "asked for", True)
    finish_pending_removals(Plant(workspace, ledger))


def with_erased(site: Path) -> None:
    """Erase other rows of the same shard first."""
    remove(site, *FIRST)


def with_all_backups(site: Path) -> None:
    """Make as many backups as are kept, so that the next backup replaces the oldest."""
    from factory.backups.backups import KEPT, make_backup
    from factory.ledger.journal import list_backups

    workspace, ledger = opened(site)
    while len(list_backups(workspace.root)) < KEPT:
        make_backup(Plant(workspace, ledger))


def with_damaged_ledger(site: Path) -> None:
    """Damage the ledger. Its daily backup is older than the ingest: the journal has all later commits."""
    for ending in ("-wal", "-shm"):
        (site / "plant" / f"ledger.db{ending}").unlink(missing_ok=True)
    with open(site / "plant" / "ledger.db", "r+b") as file:
        file.write(bytes(8192))


def with_live_log(site: Path) -> None:
    """Leave a commit of a killed daemon that only SQLite's log has, neither the ledger's file nor the backup's journal."""
    import os

    from factory.ledger.ledger import record_event

    if (child := os.fork()) == 0:
        with opened(site)[1].engine.begin() as tx:
            record_event(tx, NOTED, "daemon")
        os._exit(0)  # closing the ledger would write the log into its file
    assert os.waitpid(child, 0)[1] == 0 and (site / "plant" / "ledger.db-wal").stat().st_size > 0


def with_older_ledger(site: Path) -> None:
    """Change the ledger to schema 2: absolute paths; no identity, notes of changes, groups, backups or owners of segments."""
    import shutil

    from factory.core.workspace import Workspace
    from factory.ledger.ledger import Ledger
    from factory.ledger.stored_paths import PLACES, _each
    from tests.support.factory.older_ledger import as_schema_5

    plant = site / "plant"
    as_schema_5(plant, Ledger.open(Workspace.open(plant).ledger_url, plant))
    shutil.rmtree(plant / "backups", ignore_errors=True)
    for owner in plant.glob("segments/*/owner.json"):
        owner.unlink()
    (plant / "root").write_text(f"{plant}\n")
    with closing(sqlite3.connect(plant / "ledger.db")) as db, db:
        for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            db.execute(f'DROP TRIGGER "{name}"')
        db.executescript("DROP TABLE changes; DROP TABLE relabels; DROP TABLE runs; DROP INDEX documents_by_group;")
        for column in ("documents.group_key", "documents.facts", "held_out.sealed", "token_shards.moved"):
            db.execute("ALTER TABLE {} DROP COLUMN {}".format(*column.split(".")))
        db.execute("ALTER TABLE held_out RENAME COLUMN group_key TO source")
        db.execute("DELETE FROM meta WHERE key = 'identity'")
        db.execute("UPDATE meta SET value = '2' WHERE key = 'schema'")
        for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            for column in {row[1] for row in db.execute(f'PRAGMA table_info("{table}")')} & PLACES:
                db.execute(f'UPDATE "{table}" SET "{column}" = ? || "{column}" WHERE "{column}" > \'\'', [f"{plant}/"])
        for table, key, column in (("data_plans", "id", "plan"), ("segments", "id", "result")):
            for number, text in db.execute(
                f"SELECT {key}, {column} FROM {table} WHERE {column} IS NOT NULL"
            ).fetchall():
                tree = _each(json.loads(text), lambda place: str(plant / place))
                db.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", [json.dumps(tree), number])
