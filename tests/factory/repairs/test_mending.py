"""Damaged files are made again, bit-identical to the originals, and a person is told."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from factory.core.errors import FactoryError
from factory.core.exports import hash_export_folder
from factory.core.workspace import Workspace
from factory.duties.runner import run_duty_pass
from factory.duties.training import train_segment
from factory.evals.evaluator import refuse_damaged_export
from factory.ingest.chat_template import OLDER_TEMPLATES, TEMPLATE_WITHOUT_CALLS
from factory.ledger.ledger import Ledger, candidates, events
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, SegmentRow
from factory.repairs import repairing
from factory.repairs.checkpoints import remake_export, replay_checkpoint
from factory.repairs.repairing import call_and_repair_on_failure, repair_segment_inputs
from factory.repairs.token_shards import find_token_shard_damage, rebuild_token_shard
from factory.repairs.workspace_examination import examine_workspace_files
from factory.training.exporting import write_export
from factory.training.planning import plan_anneal, plan_trunk, read_last_checkpoint
from tests.support.factory.command import factory
from tests.support.failing.limits import few_handles
from tests.support.file_hashes import file_hashes
from tests.support.messages import codes, refused, the
from tests.support.said import Said
from trainer.contract.checkpoint.format import find_checkpoint_fault, read_manifest
from trainer.contract.data.token_shard import TokenShard

Copy = Callable[[], tuple[Workspace, Ledger]]


def flip(path: Path, at: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 0x10
    path.write_bytes(data)


def weights(ledger: Ledger, segment: int) -> dict[str, Any]:
    files = read_manifest(Path(read_last_checkpoint(ledger, segment)["path"]))["files"]
    return {name: file["sha256"] for name, file in files.items() if name != "state.json"}


def token_shards(ledger: Ledger) -> list[dict[str, Any]]:
    return ledger.read("SELECT id, path FROM token_shards ORDER BY created_at")


def test_no_file_is_repaired_while_the_process_has_no_file_handle_left(copied: Copy) -> None:
    workspace, ledger = copied()
    path, said = Path(token_shards(ledger)[0]["path"]), Said()
    shutil.rmtree(path)

    def act() -> None:
        with few_handles():
            read_manifest(Path(read_last_checkpoint(ledger, 1)["path"]))

    with pytest.raises(OSError, match="Too many open files"):
        call_and_repair_on_failure(Plant(workspace, ledger, said), act)
    assert not path.exists() and not said.lines


@pytest.mark.parametrize("damage", ["gone", "tokens.bin", "documents.parquet", "manifest.json"])
def test_a_damaged_token_shard_is_made_again_from_its_raw_shard(copied: Copy, damage: str) -> None:
    workspace, ledger = copied()
    for row in token_shards(ledger):
        folder = Path(row["path"])
        before = file_hashes(folder)
        if damage == "gone":
            shutil.rmtree(folder)
        else:
            flip(folder / damage)
        assert find_token_shard_damage(folder, deep=True)
        said = Said()
        assert rebuild_token_shard(Plant(workspace, ledger, said), row["id"]) == ""
        assert file_hashes(folder) == before
        assert len(list((workspace.root / "set-aside").glob(f"*-{folder.name}"))) == (damage != "gone")


def test_the_error_for_a_token_shard_that_cannot_be_made_again_says_why(copied: Copy) -> None:
    workspace, ledger = copied()
    row = token_shards(ledger)[0]
    policy = workspace.root / "policies" / "data.yaml"
    old = policy.read_text()
    policy.write_text(old.replace("min_chars: 80\n", "min_chars: 9000\n"))
    assert policy.read_text() != old
    shutil.rmtree(row["path"])
    assert rebuild_token_shard(Plant(workspace, ledger, Said()), row["id"]) == "", (
        "a backup has the policy at the time of the ingest"
    )
    shutil.rmtree(row["path"])
    shutil.rmtree(workspace.root / "backups")
    why = rebuild_token_shard(Plant(workspace, ledger, Said()), row["id"])
    assert codes([why]) == ["token_shards.differs"] and row["id"] not in why.data["found"]  # type: ignore[attr-defined]
    policy.write_text(old)
    raw = next((workspace.shards / "raw").glob("*-shard-0.jsonl"))
    flip(raw)
    why = rebuild_token_shard(Plant(workspace, ledger, Said()), row["id"])
    assert the([why], "token_shards.other_raw_shard").data["path"] == raw
    raw.unlink()
    why = rebuild_token_shard(Plant(workspace, ledger, Said()), row["id"])
    assert the([why], "token_shards.no_raw_shard").data["shard"] == "shard-0.jsonl"
    assert not list(workspace.shards.glob(".again-*"))


@pytest.mark.parametrize("damage", ["gone", "documents.parquet"])
def test_training_continues_after_the_repair_of_a_token_shard(copied: Copy, damage: str) -> None:
    workspace, ledger = copied()
    folder = Path(token_shards(ledger)[0]["path"])
    if damage == "gone":
        shutil.rmtree(folder)
    else:
        flip(folder / damage, -6)  # a byte of the length in the footer
        (folder / "columns.arrow").unlink()  # as in an older shard: planning makes it of the damaged file
    said = Said()
    number = call_and_repair_on_failure(Plant(workspace, ledger, said), lambda: plan_trunk(Plant(workspace, ledger), 4))
    assert f"token shard {folder.name} is repaired" in said.text
    shutil.rmtree(folder)
    train_segment(Plant(workspace, ledger, said), number)
    assert SegmentRow.get(ledger, number).state == "done"
    assert said.text.count(f"token shard {folder.name} is repaired") == 2


def test_a_changed_token_is_never_trained_on(copied: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, ledger = copied()
    folders = [Path(row["path"]) for row in token_shards(ledger)]
    hashed: list[str] = []
    look = repairing.find_token_shard_damage
    monkeypatch.setattr(
        repairing, "find_token_shard_damage", lambda path, deep: hashed.append(path.name) or look(path, deep)
    )
    first, said = plan_trunk(Plant(workspace, ledger), 4), Said()
    assert not repair_segment_inputs(Plant(workspace, ledger, said), first, hash_all=False) and set(hashed) == {
        one.name for one in folders
    }
    assert not repair_segment_inputs(Plant(workspace, ledger, said), first, hash_all=False) and len(hashed) == len(
        folders
    )
    before = file_hashes(folders[0])
    flip(folders[0] / "tokens.bin")
    train_segment(Plant(workspace, ledger, said), first)
    assert f"token shard {folders[0].name} is repaired" in said.text and file_hashes(folders[0]) == before
    assert hashed[len(folders) :] == [folders[0].name] and SegmentRow.get(ledger, first).attempts == 0
    assert (
        not repair_segment_inputs(Plant(workspace, ledger, said), first, hash_all=False)
        and len(hashed) == len(folders) + 1
    )


def test_changed_columns_of_a_token_shard_are_never_trained_on(copied: Copy) -> None:
    """The start of a document changes; opening the shard does not notice that, and the comparison before the segment does."""
    workspace, ledger = copied()
    folder, said = Path(token_shards(ledger)[0]["path"]), Said()
    number = plan_trunk(Plant(workspace, ledger), 4)
    assert not repair_segment_inputs(Plant(workspace, ledger, said), number, hash_all=False) and not said.lines
    before, path = file_hashes(folder), folder / "columns.arrow"
    flip(path, path.read_bytes().index(TokenShard(folder).columns.start.tobytes()) + 8)
    assert not find_token_shard_damage(folder, deep=True), "no file of the shard itself is damaged"
    train_segment(Plant(workspace, ledger, said), number)
    assert f"token shard {folder.name}" in said.text and file_hashes(folder) == before
    assert SegmentRow.get(ledger, number).state == "done" and SegmentRow.get(ledger, number).attempts == 0
    assert not repair_segment_inputs(Plant(workspace, ledger, said), number, hash_all=False)


def test_a_changed_export_is_made_again_and_the_failed_action_is_repeated(copied: Copy) -> None:
    workspace, ledger = copied()
    row = CandidateRow.find_first(ledger, "ORDER BY id")
    assert row is not None
    (Path(row.export_path) / "README.md").write_text("# Ours")
    said = Said()
    call_and_repair_on_failure(Plant(workspace, ledger, said), lambda: refuse_damaged_export(row))
    assert (
        f"export {row.id} is repaired" in said.text and hash_export_folder(Path(row.export_path)) == row.export_sha256
    )


def test_an_older_factorys_export_is_made_again_unchanged(copied: Copy) -> None:
    """It gets the older chat template. The new template refuses roles that spell special tokens."""
    workspace, ledger = copied()
    row = CandidateRow.find_first(ledger, "ORDER BY id")
    assert row is not None
    export = Path(row.export_path)
    (workspace.tokenizer / "chat_template.jinja").write_text(OLDER_TEMPLATES[0])
    write_export(Plant(workspace, ledger), SegmentRow.get(ledger, row.segment), export, original_defaults=True)
    with ledger.begin() as tx:
        tx.execute(candidates.update().values(export_sha256=hash_export_folder(export)))
        tx.execute(events.update().where(events.c.kind == "candidate").values(detail={"segment": row.segment}))
    flip(export / "model.safetensors", -9)
    assert remake_export(Plant(workspace, ledger), row.id) == ""
    assert hash_export_folder(export) == CandidateRow.get(ledger, row.id).export_sha256
    assert (export / "chat_template.jinja").read_text() == OLDER_TEMPLATES[0]
    write_export(Plant(workspace, ledger), SegmentRow.get(ledger, row.segment), export)
    assert (export / "chat_template.jinja").read_text() == TEMPLATE_WITHOUT_CALLS


def test_a_flipped_byte_in_a_parents_checkpoint_does_not_stop_training(copied: Copy) -> None:
    workspace, ledger = copied()
    before, path = weights(ledger, 1), Path(read_last_checkpoint(ledger, 1)["path"])
    flip(path / "model.safetensors", -5)
    number = plan_anneal(Plant(workspace, ledger))
    said = Said()
    train_segment(Plant(workspace, ledger, said), number)
    assert SegmentRow.get(ledger, number).state == "done" and SegmentRow.get(ledger, number).attempts == 0
    assert the(said.lines, "checkpoints.replay").data["segment"] == 1
    assert the(said.lines, "checkpoints.replayed").data["comparison"].code == "checkpoints.same_weights"
    assert weights(ledger, 1) == before and find_checkpoint_fault(path) == ""
    assert find_checkpoint_fault(path.with_name(f"bad-{path.name}"))
    event = ledger.read("SELECT detail FROM events WHERE kind = 'checkpoint_replayed'")
    assert len(event) == 1 and event[0]["detail"]["exact"] is True


def test_a_replay_of_a_segment_replays_its_damaged_parent_first(copied: Copy) -> None:
    workspace, ledger = copied()
    before = [weights(ledger, number) for number in (1, 2)]
    for number in (1, 2):
        shutil.rmtree(Path(SegmentRow.get(ledger, number).folder) / "checkpoints")
    shutil.rmtree(token_shards(ledger)[1]["path"])
    assert rebuild_token_shard(Plant(workspace, ledger, Said()), token_shards(ledger)[1]["id"]) == ""
    said = Said()
    assert replay_checkpoint(Plant(workspace, ledger, said), 2) == ""
    replays = [line.data for line in said.lines if codes([line]) == ["checkpoints.replay"]]  # type: ignore[attr-defined]
    assert [(one["segment"], one["first"]) for one in replays] == [(1, 0), (2, replays[1]["first"])]
    made = [line.data for line in said.lines if codes([line]) == ["checkpoints.replayed"]]  # type: ignore[attr-defined]
    assert {one["comparison"].code for one in made} == {"checkpoints.not_comparable"}
    assert [weights(ledger, number) for number in (1, 2)] == before
    assert not list((workspace.root / "replays").glob("*-*/*"))


@pytest.mark.slow("a plant with every fault")
def test_check_names_each_fault_and_repairs_it(copied: Copy) -> None:
    workspace, ledger = copied()
    shards, candidate = token_shards(ledger), CandidateRow.get(ledger, 1)
    flip(Path(shards[0]["path"]) / "tokens.bin")
    flip(Path(read_last_checkpoint(ledger, 1)["path"]) / "optimizer.safetensors", -9)
    flip(Path(candidate.export_path) / "model.safetensors", -9)
    next((workspace.shards / "raw").glob("*-shard-1.jsonl")).unlink()
    (workspace.segments / "00044-trunk").mkdir()
    (workspace.root / "mlflow.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    with closing(sqlite3.connect(workspace.root / "ledger.db")) as opened:
        opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    flip(workspace.root / "ledger.db", 4096 * 3)
    ledger.engine.dispose()
    (workspace.root / "ledger.db").write_bytes((workspace.root / "ledger.db").read_bytes()[:20_000])
    words = ("check", "--deep", "--json", "-w", str(workspace.root))
    found = {row["check"]: row for row in json.loads(factory(*words).stdout)}
    assert not found["ledger"]["ok"] and "'factory check --repair'" in found["ledger"]["detail"]
    done = factory(*words, "--repair")
    repaired = "\n".join(one["text"] if isinstance(one, dict) else one for one in json.loads(done.stdout)["repaired"])
    assert "restored from backup" in repaired
    for name in (f"token shards {shards[0]['id']}", "checkpoints 1", "exports 1", "mlflow"):
        assert f"{name}: repaired" in repaired, repaired
    found = {row["check"]: row for row in json.loads(done.stdout)["checks"]}
    for name in ("ledger", "token shards", "checkpoints", "exports", "segments", "mlflow", "orphans", "backups"):
        assert found[name]["ok"], found[name]
    assert not found["raw shards"]["ok"] and "(original name: shard-1.jsonl)" in found["raw shards"]["detail"]
    assert done.returncode == 1
    assert hash_export_folder(Path(candidate.export_path)) == candidate.export_sha256
    assert "segments/00044-trunk is set aside" in repaired


def test_check_examines_every_file_and_hashes_a_sample(copied: Copy) -> None:
    workspace, ledger = copied()
    kinds = {one.kind: one for one in examine_workspace_files(Plant(workspace, ledger, Said()), False)}
    assert {name: one.count for name, one in kinds.items()} == {
        "tokenizer": 1, "token shards": 2, "raw shards": 2, "hashes": 2, "checkpoints": 2, "exports": 1, "segments": 2, "served": 0, "orphans": 0,
    }  # fmt: skip
    assert all(one.faults == [] for one in kinds.values()) and kinds["checkpoints"].hashed >= 1
    (Path(token_shards(ledger)[0]["path"]) / "loss_mask.bin").write_bytes(b"")
    (workspace.segments / "00001-trunk" / "owner.json").unlink()
    (workspace.segments / "00044-trunk").mkdir()
    shutil.rmtree(workspace.exports / "segment-00002")
    kinds = {one.kind: one for one in examine_workspace_files(Plant(workspace, ledger, Said()), False)}
    assert {name for name, one in kinds.items() if one.faults} == {"token shards", "segments", "exports", "orphans"}


def test_a_failed_repair_is_an_error_with_the_reason(copied: Copy) -> None:
    workspace, ledger = copied()
    shutil.rmtree(token_shards(ledger)[0]["path"])
    shutil.rmtree(workspace.shards / "raw")
    with refused("repairing.failed", FactoryError) as raised:
        run_duty_pass(Plant(workspace, ledger, Said()), settle=0.0, endless=True)
    assert the([raised.value.data["why"]], "token_shards.no_raw_shard").data["shard"] == "shard-0.jsonl"
