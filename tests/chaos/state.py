"""What two runs of a scenario must have in common, and what must hold for each run.

The state is read from files only: the ledger and MLflow's store through SQLite, the repository through git. Values that differ between runs
are left out: times, hashes of commits (they contain times), process numbers.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import subprocess
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from factory.backups.backups import find_database_damage
from factory.core.exports import hash_export_folder
from factory.git.git_store import MARK
from factory.ingest.hash_index import make_key_prefix
from factory.ledger.journal import NAME, describe_journal_damage, list_backup_folders, read_backup_info
from trainer.contract.json_lines import read_json_lines

State = dict[str, Any]
# Events that must occur exactly once.
EVENTS = (
    "ingested", "segment_done", "segment_failed", "candidate", "release_decided", "promoted", "withdrawn", "proposal_approved", "proposal_reverted",
    "anomaly_closed", "anomaly_asked", "anomaly_diagnosed", "segment_rewound", "quarantined", "rejected",
    "data_removed", "data_erased", "noted",
)  # fmt: skip
DIAGNOSIS = ("causes", "guilty", "triggers", "suspects", "arms", "steps", "remedy", "why", "onset", "last")
TABLES = {
    "shards": "SELECT sha256, name, path, state, rows, counts, tokens FROM shards ORDER BY sha256",
    "documents": "SELECT key, id, fate, rule, matched, tokens, supervised_tokens, token_shard FROM documents ORDER BY key",
    "held out": "SELECT key, content FROM held_out ORDER BY key",
    "token shards": "SELECT id, shard, documents, tokens FROM token_shards ORDER BY id",
    "tokenizers": "SELECT sha256 FROM tokenizers",
    "segments": "SELECT id, kind, parent, generation, recipe_sha256, data_plan, first_step, last_step, state FROM segments ORDER BY id",
    "checkpoints": "SELECT segment, step, path FROM checkpoints ORDER BY segment, step",
    "candidates": "SELECT id, segment, export_sha256 FROM candidates ORDER BY id",
    "evaluations": "SELECT id, candidate FROM evaluations ORDER BY id",
    "items": "SELECT task, item, value, weight FROM eval_items ORDER BY 1, 2",
    "verdicts": "SELECT gate, subject, outcome FROM verdicts ORDER BY gate, subject, outcome",
    "releases": "SELECT number, candidate, state, mlflow_version FROM releases ORDER BY number",
    "anomalies": "SELECT segment, step, kind FROM anomalies ORDER BY 1, 2, 3",
    "proposals": "SELECT number, state, branch FROM proposals ORDER BY number",
    "tracked": "SELECT subject FROM tracked_runs ORDER BY subject",
}
MLFLOW = {
    "runs": """SELECT e.name, t.value, r.status FROM runs r JOIN experiments e USING (experiment_id)
        LEFT JOIN tags t ON t.run_uuid = r.run_uuid AND t.key = 'factory.subject' ORDER BY 1, 2, 3""",
    "metrics": """SELECT t.value, m.key, COUNT(*), COUNT(DISTINCT m.step) FROM metrics m
        JOIN tags t ON t.run_uuid = m.run_uuid AND t.key = 'factory.subject'
        WHERE m.key NOT LIKE '%seconds%' AND m.key NOT LIKE '%tokens_per_s%'
            AND m.key NOT LIKE '%first_step_s%'  -- of each trainer that was started: one that was killed has two
        GROUP BY 1, 2 ORDER BY 1, 2""",
    "aliases": "SELECT name, alias, version FROM registered_model_aliases ORDER BY 1, 2",
    "versions": "SELECT name, version, status FROM model_versions ORDER BY 1, 2",
    "version tags": """SELECT version, key, value FROM model_version_tags
        WHERE key NOT IN ('code_commit', 'judged_at') ORDER BY 1, 2""",
}
LEFT_OVER = re.compile(
    r"(^|/)(\.writing-)|\.factory-part$|/\.champion\.new$|\.git(/.*)?\.lock$|worktrees/[^/]*\.part$|\.writing$|exports/\.|\.erased$|/\.restoring$|\.restored$|/\.backup-|/\.again-"
)


def state_of(site: Path) -> State:
    plant = site / "plant"
    found: State = {"ledger": {}, "mlflow": {}}
    with closing(_opened(plant / "ledger.db")) as db:
        for name, query in TABLES.items():
            found["ledger"][name] = [list(row) for row in db.execute(query)]
        kinds = Counter(row[0] for row in db.execute("SELECT kind FROM events"))
        found["ledger"]["events"] = {kind: kinds[kind] for kind in EVENTS if kinds[kind]}
        measured = "SELECT subject, detail FROM events WHERE kind = 'replicas_measured' ORDER BY id"
        found["replicas"] = [[subject, json.loads(detail)["runs"]] for subject, detail in db.execute(measured)]
        diagnoses = [
            json.loads(row[0])
            for row in db.execute("SELECT detail FROM events WHERE kind = 'anomaly_diagnosed' ORDER BY id")
        ]
        found["diagnoses"] = [{key: one[key] for key in DIAGNOSIS if key in one} for one in diagnoses]
        folders = [(row[0], row[1]) for row in db.execute("SELECT id, folder FROM segments WHERE state <> 'planned'")]
    if (plant / "mlflow.db").exists():
        with closing(_opened(plant / "mlflow.db")) as db:
            found["mlflow"] = {name: [list(row) for row in db.execute(query)] for name, query in MLFLOW.items()}
    found["order"] = {number: _order((plant / folder) / "metrics.jsonl") for number, folder in folders}
    found["weights"] = {number: _weights(plant / folder) for number, folder in folders}
    found["token shards"] = {p.parent.name: _sha256(p) for p in sorted((plant / "shards").glob("[0-9a-f]*/tokens.bin"))}
    found["hashes"] = {p.name: _sha256(p) for p in sorted((plant / "shards" / "hashes").glob("*"))}
    found["raw shards"] = _raw(plant)
    found["raw"] = {p.name: _sha256(p) for p in sorted((plant / "shards" / "raw").glob("*"))}
    found["inbox"] = sorted(p.name for p in (plant / "inbox").iterdir())
    found["exports"] = {
        p.name: _folder(p) for p in sorted((plant / "exports").iterdir()) if p.is_dir() and not p.is_symlink()
    }
    found["served"] = _served(plant / "exports")
    found["reports"] = sorted(p.name for p in (plant / "reports").glob("[!.]*"))
    found["git"] = _git(site / "target", plant)
    found["left over"] = sorted(
        Counter(_plain(str(p.relative_to(site))) for p in site.rglob("*") if _is_left_over(p, site)).items()
    )
    return found


def outline(state: State) -> State:
    """Return counts that do not depend on the commit or the weights, and are smaller if work is missing."""
    counted = lambda value: len(value) if isinstance(value, dict | list) else value
    return {
        key: {str(name): counted(inner) for name, inner in value.items()} if isinstance(value, dict) else counted(value)
        for key, value in state.items()
    }


def differences(want: State, found: State, path: str = "") -> list[str]:
    """Return a few lines about the differences of two states."""
    lines: list[str] = []
    for key in [*want, *(key for key in found if key not in want)]:
        old, new = want.get(key), found.get(key)
        if old == new:
            continue
        where = f"{path}{key}"
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{where}/")
        elif isinstance(old, list) and isinstance(new, list):
            gone, more = [row for row in old if row not in new], [row for row in new if row not in old]
            lines.append(
                f"{where}: {len(gone)} missing, {len(more)} more: {str(gone[:2])[:300]} → {str(more[:2])[:300]}"
            )
        else:
            lines.append(f"{where}: {str(old)[:200]} → {str(new)[:200]}")
    return lines[:12]


def broken(site: Path) -> list[str]:
    """Return the violated conditions of a ledger and of the files that it names."""
    plant, wrong = site / "plant", []
    with closing(_opened(plant / "ledger.db")) as db:
        wrong += [f"ledger: {row[0]}" for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"]
        wrong += [f"ledger: a row of {row[0]} names none of {row[2]}" for row in db.execute("PRAGMA foreign_key_check")]
        erased = [
            json.loads(row[0])
            for row in db.execute("SELECT detail FROM events WHERE kind = 'shard_erased' ORDER BY id")
        ]
        content = {identity: one["content"] for detail in erased for identity, one in detail["token_shards"].items()}
        for identity, path in db.execute("SELECT id, path FROM token_shards"):
            wrong += _check_files((plant / path), content.get(identity, identity)[:32], hashlib.sha256)
        for (path,) in db.execute("SELECT path FROM checkpoints"):
            wrong += _check_files(plant / path)
        doubled = "SELECT id FROM documents WHERE fate = 'train' GROUP BY shard, row HAVING COUNT(*) > 1"
        wrong += [f"document {row[0]} is trained on twice" for row in db.execute(doubled)]
        for number, outcome in db.execute(
            "SELECT r.number, v.outcome FROM releases r JOIN verdicts v ON v.id = r.verdict"
        ):
            if outcome != "promote":
                wrong.append(f"release {number} has the verdict {outcome}")
        promoted = "SELECT subject FROM events WHERE kind = 'promoted' GROUP BY subject HAVING COUNT(*) > 1"
        wrong += [f"{row[0]} was promoted twice" for row in db.execute(promoted)]
        there = {p.stem for p in (plant / "shards" / "hashes").glob("*")}
        for (subject,) in db.execute("SELECT subject FROM events WHERE kind IN ('ingested', 'task_items_held')"):
            wrong += [] if make_key_prefix(subject) in there else [f"{subject} was recorded without its hashes"]
    if (plant / "index.db").exists():
        with closing(_opened(plant / "index.db")) as db:
            wrong += [f"index.db: {row[0]}" for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"]
    if (plant / "mlflow.db").exists():
        with closing(_opened(plant / "mlflow.db")) as db:
            wrong += [f"mlflow.db: {row[0]}" for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"]
            twice = "SELECT value FROM tags WHERE key = 'factory.subject' GROUP BY value HAVING COUNT(*) > 1"
            wrong += [f"MLflow has two runs of {row[0]}" for row in db.execute(twice)]
    for backup in list_backup_folders(plant):
        if fault := find_database_damage(backup / "ledger.db"):
            wrong.append(f"backup {backup.name}: {fault}")
        if not read_backup_info(backup):
            wrong.append(f"backup {backup.name} does not say what it is")
        if damage := describe_journal_damage(backup / NAME):
            wrong.append(f"backup {backup.name}: {damage}")
    return wrong


def lost(site: Path, scenario: str) -> list[str]:
    """Return the files that the ledger names but that are missing before any repair: a flush came too late, or never.

    During the revert of a patch the checkout does not match the ledger yet. It is checked when the revert is done.
    """
    plant = site / "plant"
    if scenario in ("restore", "replace") and find_database_damage(plant / "ledger.db"):
        return []  # the scenario restores the ledger
    if not (plant / "ledger.db").exists():
        return ["the ledger is gone"]
    try:
        wrong = broken(site)
    except sqlite3.Error as error:
        return [f"a database cannot be read: {error}"]
    with closing(_opened(plant / "ledger.db")) as db:
        for number, path, sha256 in db.execute("SELECT id, export_path, export_sha256 FROM candidates"):
            if not (plant / path).is_dir() or hash_export_folder(plant / path) != sha256:
                wrong.append(f"the export of candidate {number} is not what was recorded")
        served = "SELECT number FROM releases WHERE state = 'published' ORDER BY number DESC LIMIT 1"
        for (number,) in db.execute(served):
            link, note = _served(plant / "exports")
            if not link or not note or note["release"] != number or note["export"] != link:
                wrong.append(f"release {number} is published, and {link} is served")
        for (sha256,) in db.execute("SELECT sha256 FROM tokenizers"):
            if not (file := plant / "tokenizer" / "tokenizer.json").exists() or _sha256(file) != sha256:
                wrong.append("the tokenizer is not the recorded one")
        for number, folder, step in db.execute("SELECT id, folder, last_step FROM segments WHERE state = 'done'"):
            steps = [row[0] for row in _order((plant / folder) / "metrics.jsonl")]
            if steps[-1:] != [step - 1] or not _is_json((plant / folder) / "segment.json"):
                wrong.append(
                    f"segment {number} is done, and its metrics end at step {steps[-1:]}, or its specification is lost"
                )
        decided = "SELECT state, branch FROM proposals WHERE state IN ('approved', 'reverted')"
        for state, branch in db.execute(decided):
            target = site / "target"
            under_way = state == "approved" and scenario == "revert"
            changes = [] if under_way else _lines(target, "status", "--porcelain")
            held = _lines(target, "merge-base", "--is-ancestor", branch, "HEAD")
            if changes or held:
                wrong.append(f"a proposal is {state}, and the checkout says {changes or held}")
    for rung in plant.glob("ladder/*/step-*"):
        wrong += _check_files(rung)
    if list((plant / "mlartifacts").glob("*")) or (plant / "mlflow.db").exists():
        wrong += _check_store(plant / "mlflow.db")
    return wrong


def _check_store(path: Path) -> list[str]:
    try:
        with closing(_opened(path)) as db:
            return (
                [] if db.execute("SELECT version_num FROM alembic_version").fetchone() else ["MLflow's store is empty"]
            )
    except sqlite3.Error as error:
        return [f"MLflow's store: {error}"]


def _raw(plant: Path) -> dict[str, bool]:
    """Return whether each shard is at its path in the ledger, to which it is moved after the transaction."""
    with closing(_opened(plant / "ledger.db")) as db:
        return {
            name: (plant / path).is_file() for name, path in db.execute("SELECT name, path FROM shards ORDER BY name")
        }


def _is_json(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_text()), dict)
    except (OSError, ValueError):
        return False


def _check_files(folder: Path, identity: str = "", hashed: Any = None) -> list[str]:
    """Return whether a folder has the files that its manifest names."""
    try:
        encoded = (folder / "manifest.json").read_bytes()
        if identity and hashed(encoded).hexdigest()[:32] != identity:
            return [f"{folder}: another manifest than the ledger's"]
        files = json.loads(encoded)["files"]
        wanted = {name: entry if isinstance(entry, str) else entry["sha256"] for name, entry in files.items()}
        return [
            f"{folder / name} is not what its manifest says"
            for name, sha256 in wanted.items()
            if _sha256(folder / name) != sha256
        ]
    except (OSError, ValueError) as error:
        return [f"{folder}: {error}"]


def _opened(path: Path) -> sqlite3.Connection:
    """Return a copy in memory, so that reading changes nothing."""
    source = sqlite3.connect(f"file:{path}?mode=rw", uri=True)
    memory = sqlite3.connect(":memory:")
    with closing(source):
        source.backup(memory)
    return memory


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _order(path: Path) -> list[Any]:
    """Return step, tokens and loss of each line of metrics. All depend on the order of the documents."""
    rows = read_json_lines(path) if path.exists() else []
    return [[row["step"], row["tokens"], row["loss"]] for row in rows]


def _weights(folder: Path) -> dict[str, str]:
    last = sorted((folder / "checkpoints").glob("step-*"))[-1:]
    return {p.name: _sha256(p) for checkpoint in last for p in sorted(checkpoint.glob("*.safetensors"))}


def _folder(folder: Path) -> dict[str, str]:
    return {p.name: _sha256(p) for p in sorted(folder.iterdir()) if p.is_file()}


def _served(exports: Path) -> Any:
    link, note = exports / "champion", exports / "serving.json"
    return [
        str(link.readlink()) if link.is_symlink() else None,
        json.loads(note.read_text()) if note.exists() else None,
    ]


def _git(target: Path, plant: Path) -> State:
    refs = _lines(target, "for-each-ref", "--format=%(refname) %(objectname)")
    trees = {
        name: _lines(target, "rev-parse", f"{commit}^{{tree}}") for name, commit in (line.split() for line in refs)
    }
    head = _lines(target, "rev-parse", "HEAD")[0][:12]
    folders = sorted(_plain(p.name.replace(head, "HEAD")) for p in (plant / "worktrees").iterdir())
    known = [
        line.split()[-1].replace(head, "HEAD")
        for line in _lines(target, "worktree", "list", "--porcelain")
        if line.startswith("worktree ")
    ]
    return {
        "refs": trees,
        "HEAD": _lines(target, "symbolic-ref", "HEAD"),
        "changes": _lines(target, "status", "--porcelain"),
        "messages": _lines(target, "log", "--format=%s", "HEAD"),
        "worktrees": sorted(map(_plain, known)),
        "folders": folders,
        "faults": [line for line in _lines(target, "fsck", "--no-dangling") if "dangling" not in line],
    }


def _lines(folder: Path, *words: str) -> list[str]:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    return done.stdout.splitlines() + ([f"git {words[0]}: {done.stderr.strip()}"] if done.returncode else [])


def _plain(name: str) -> str:
    return re.sub(r"[0-9a-f]{12,}|\d+", "#", name)


def _is_left_over(path: Path, site: Path) -> bool:
    if path.suffix == ".lock" and (site / "target" / ".git" / MARK).exists():
        return False  # the next command that changes the repository removes the lock file
    return bool(LEFT_OVER.search(f"/{path.relative_to(site)}"))
