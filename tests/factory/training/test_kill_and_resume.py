"""Kill the factory at many points of its work: started again, it ends exactly where an uninterrupted run ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from factory.core.workspace import Config, Workspace
from factory.ledger.ledger import Ledger
from factory.ledger.reader import Reader
from tests.support.lent_libraries import lend
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.plants.trained_plant import lenient, write_shards


def start(workspace: Workspace) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with open(workspace.logs / "daemon.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "factory", "run", "--once", "--workspace", str(workspace.root)],
            cwd=workspace.root,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def end_state(workspace: Workspace) -> dict[str, Any]:
    """What must not depend on the kills. Paths, times and attempts may differ."""
    read = Reader(workspace).read
    return {
        "documents": read("SELECT key, id, fate, rule, matched, tokens, token_shard FROM documents ORDER BY key"),
        "shards": read("SELECT sha256, state, counts FROM shards ORDER BY sha256"),
        "segments": read("SELECT id, kind, parent, first_step, last_step, state FROM segments ORDER BY id"),
        "checkpoints": read("SELECT segment, step FROM checkpoints ORDER BY segment, step"),
        "candidates": read("SELECT id, segment, export_sha256 FROM candidates ORDER BY id"),
        "items": read("SELECT evaluation, task, item, value FROM eval_items ORDER BY evaluation, task, item"),
        "verdicts": read("SELECT id, subject, outcome, reasons FROM verdicts ORDER BY id"),
        "releases": read("SELECT number, candidate, state, mlflow_version FROM releases ORDER BY number"),
        "inbox": sorted(path.name for path in workspace.inbox.iterdir()),
    }


def metrics_lines(workspace: Workspace, kind: str) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in workspace.segments.glob(f"*-{kind}/metrics.jsonl"))


def count(table: str, where: str = "1") -> Callable[[Workspace], bool]:
    return lambda workspace: Reader(workspace).read(f"SELECT COUNT(*) AS n FROM {table} WHERE {where}")[0]["n"] > 0


KILL_POINTS: dict[str, Callable[[Workspace], bool]] = {
    "the tokenizer exists": lambda workspace: any(workspace.tokenizer.iterdir()),
    "one shard is in": count("shards"),
    "a segment is planned": count("segments"),
    "the trunk trains": lambda workspace: metrics_lines(workspace, "trunk") >= 3,
    "the anneal trains": lambda workspace: metrics_lines(workspace, "anneal") >= 1,
    "a candidate is exported": count("candidates"),
    "a candidate is evaluated": count("evaluations"),
    "a verdict stands": count("verdicts"),
    "a release is decided": count("releases"),
}


@pytest.mark.long("the whole factory twice, nine times killed")
def test_killed_anywhere_it_ends_where_an_uninterrupted_run_ends(plant: Workspace, tmp_path: Path) -> None:
    calm = Workspace.create(tmp_path / "calm", Config(recipe="tiny", repository=plant.config.repository))
    Ledger.create(calm.ledger_url)
    for workspace in (calm, plant):
        write_shards(lend(workspace).inbox)
    # The tiny model is not meant to be good: let it pass the floors, so that a release is reached.
    policy = (ROOT / "policies" / "gates" / "release.yaml").read_text()
    for workspace in (calm, plant):
        (workspace.root / "policies" / "gates").mkdir(parents=True)
        (workspace.root / "policies" / "gates" / "release.yaml").write_text(lenient(policy))

        data = (ROOT / "policies" / "data.yaml").read_text()
        (workspace.root / "policies" / "data.yaml").write_text(data.replace("vocab_size: 4096", "vocab_size: 512"))

    uninterrupted = start(calm)
    assert uninterrupted.wait(timeout=PATIENCE_S) == 0, (calm.logs / "daemon.log").read_text()[-3000:]
    expected = end_state(calm)
    assert expected["inbox"] == [] and len(expected["shards"]) == 2
    assert [segment["state"] for segment in expected["segments"]] == ["done", "done"]

    killed = []
    for name, reached in KILL_POINTS.items():
        process = start(plant)
        deadline = time.monotonic() + PATIENCE_S
        while process.poll() is None and not reached(plant):
            assert time.monotonic() < deadline, name
            time.sleep(0.02)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)  # the daemon alone: what it started must cope by itself
            killed.append(name)
        process.wait()
    assert len(killed) >= 5, killed
    last = start(plant)
    assert last.wait(timeout=PATIENCE_S) == 0, (plant.logs / "daemon.log").read_text()[-3000:]
    assert end_state(plant) == expected
    shutil.rmtree(plant.root)
