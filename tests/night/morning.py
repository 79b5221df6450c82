"""Checks after a night of faults: nothing lost, nothing doubled, the weights of a night without faults, the right champion."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, ReleaseRow, SegmentRow
from factory.show.mlflow.registry import CHAMPION, MODEL
from factory.show.mlflow.runs import MlflowTracking
from factory.training.planning import read_data_plan, read_last_checkpoint
from tests.night.daemon import Night
from tests.support.git import git
from trainer.__main__ import main as train


def wrong_in_the_morning(night: Night) -> list[str]:
    """Return a line for each problem after ``factory run --once`` and ``factory check --deep --repair``; [] if all is well."""
    finished = night.command("run", "--once")
    if finished.returncode:
        return [f"factory run --once: exit {finished.returncode}: {(finished.stdout + finished.stderr)[-1500:]}"]
    repaired = night.command("check", "--deep", "--repair")  # repairs damaged files that no action has needed yet
    if repaired.returncode:
        return [f"factory check --deep --repair: exit {repaired.returncode}: {repaired.stdout[-1500:]}"]
    ledger = Ledger.open(night.workspace.ledger_url)
    return [
        *_documents(night, ledger),
        *_training(night, ledger),
        *_weights(ledger),
        *_releases(night, ledger),
        *_left(night, ledger),
    ]


def _documents(night: Night, ledger: Ledger) -> Iterator[str]:
    """Each document that arrived must have been ingested exactly once."""
    states = {row["name"]: row for row in ledger.read("SELECT * FROM shards")}
    for name, ids in night.dropped.items():
        if name not in states or states[name]["state"] != "ingested":
            yield f"shard {name} is not ingested: {states.get(name, {}).get('reason')}"
            continue
        held = Counter(
            row["id"] for row in ledger.read("SELECT id FROM documents WHERE shard = :s", s=states[name]["sha256"])
        )
        if held != Counter(ids):
            yield f"shard {name}: {len(set(ids) - set(held))} documents lost, {sum(held.values()) - len(held)} doubled"
    if left := [path.name for path in night.workspace.inbox.glob("*.jsonl") if path.name in night.dropped]:
        yield f"in the inbox still: {left}"


def _training(night: Night, ledger: Ledger) -> Iterator[str]:
    """The newest plan must have each token shard once, and the trunk's steps must be contiguous."""
    if waiting := SegmentRow.select(ledger, "WHERE state NOT IN ('done', 'rewound')"):
        yield f"segments are not done: {[(row.id, row.state) for row in waiting]}"
    lineage = trunk(ledger)
    if not lineage:
        yield "there is no trunk"
        return
    planned = Counter(shard["id"] for shard in read_data_plan(ledger, lineage[-1])["token_shards"])
    every = {row["id"] for row in ledger.read("SELECT id FROM token_shards WHERE tokens > 0")}
    if set(planned) != every or max(planned.values()) > 1:
        yield f"{len(every - set(planned))} token shards are not trained on; {sum(n > 1 for n in planned.values())} are planned twice"
    if lineage[0].parent is not None or lineage[0].first_step != 0:
        yield f"the trunk begins with segment {lineage[0].id} at step {lineage[0].first_step}"
    for before, after in zip(lineage, lineage[1:], strict=False):
        if after.first_step != before.last_step:
            yield f"segment {after.id} begins at step {after.first_step}, and segment {before.id} ended at {before.last_step}"
    others = SegmentRow.select(ledger, "WHERE kind = 'trunk' AND state = 'done' AND parent IS NULL")
    if len(others) > 1:
        yield f"a second trunk was begun: segments {[row.id for row in others]}"


def trunk(ledger: Ledger) -> list[SegmentRow]:
    newest = SegmentRow.find_first(ledger, "WHERE kind = 'trunk' AND state = 'done' ORDER BY id DESC")
    return list(SegmentRow.read_lineage(ledger, newest.id)) if newest else []


def _weights(ledger: Ledger) -> Iterator[str]:
    """The trunk, trained again from its first step without a fault, must have the same bits."""
    torch.set_num_threads(1)
    root, start = Path(tempfile.mkdtemp(prefix="factory-morning-")), None
    try:
        for row in sorted(trunk(ledger), key=lambda row: row.first_step):
            stored = Path(read_last_checkpoint(ledger, row.id)["path"])
            folder = root / f"{row.id:05d}"
            folder.mkdir()
            spec = json.loads((Path(row.folder) / "segment.json").read_text()) | {"initial_checkpoint": start}
            (folder / "segment.json").write_text(json.dumps(spec))
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = train([str(folder)])
            if code:
                yield f"segment {row.id} cannot be trained again: {said.getvalue()[-300:]}"
                return
            start = json.loads((folder / "result.json").read_text())["checkpoint"]
            if not stored.exists():
                continue  # retention removed it: later checkpoints are compared
            ours, theirs = load_file(Path(start) / "model.safetensors"), load_file(stored / "model.safetensors")
            if any(not torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys()):
                yield f"segment {row.id}: its weights are not those of a night without a fault"
                return
    finally:
        shutil.rmtree(root)


def _releases(night: Night, ledger: Ledger) -> Iterator[str]:
    releases = ReleaseRow.select(ledger, "ORDER BY number")
    promoted = [
        row["id"]
        for row in ledger.read("SELECT id FROM verdicts WHERE gate = 'release' AND outcome = 'promote' ORDER BY id")
    ]
    if [row.verdict for row in releases] != [
        verdict for verdict in promoted if verdict in {row.verdict for row in releases}
    ]:
        yield "releases are not in the order of their verdicts"
    if any(row.state != "published" for row in releases):
        yield "a release is half done"
    if not releases:
        yield "nothing was released"
        return
    newest = releases[-1]
    champion = (night.workspace.exports / "champion").resolve()
    if champion != Path(CandidateRow.get(ledger, newest.candidate).export_path).resolve():
        yield f"exports/champion is {champion.name}, and release {newest.number} is candidate {newest.candidate}"
    client = MlflowTracking.open(Plant(night.workspace, ledger)).client
    shown = client.get_model_version_by_alias(MODEL, CHAMPION)
    if shown.tags.get("candidate") != str(newest.candidate):
        yield f"MLflow's champion is {shown.tags}, the ledger's candidate {newest.candidate}"
    if running := client.search_runs(
        [e.experiment_id for e in client.search_experiments()], "attributes.status = 'RUNNING'"
    ):
        yield f"{len(running)} runs of MLflow are left RUNNING: {[run.info.run_name for run in running][:5]}"


def _left(night: Night, ledger: Ledger) -> Iterator[str]:
    worktrees = git(night.workspace.repository, "worktree", "list", "--porcelain").count("worktree ") - 1
    live = len(list(night.workspace.worktrees.glob("live-*")))
    if worktrees != live:
        yield f"git knows {worktrees} worktrees, and {live} are there"
    running = night.tree()
    if running:
        yield f"{len(running)} processes are left"
    examined = night.command("check", "--deep")
    if examined.returncode:
        yield f"factory check --deep: {examined.stdout[-1500:]}"
