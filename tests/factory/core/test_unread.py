"""A read that fails for lack of file handles says nothing about the file: the file is neither damaged nor missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from factory.core.exports import hash_export_folder
from factory.core.faults import NO_FILE_HANDLES, find_fault_in
from factory.evals.export_folder import ExportError, read_json
from factory.evals.export_parity import hash_export_tensors
from factory.ingest import vocabulary
from factory.ingest.readers import ShardProblem, read_rows
from factory.ingest.rules.policy import DataPolicy, ShardLimits
from factory.repairs.checkpoints import find_checkpoint_damage, find_export_damage
from factory.repairs.token_shards import find_token_shard_damage
from factory.replicas import train_replicas
from factory.runs.arm import Arm
from factory.runs.live_training import prepare_arm_folder
from tests.support.factory.exports import save_export, tiny_model
from tests.support.failing.limits import few_handles
from tests.support.paths import ROOT
from tests.support.serving.served import tokenizer
from tests.support.trainer.segments import make_documents
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.format import Checkpoint, hash_manifest
from trainer.contract.data.token_shard import write_token_shard


@dataclass(frozen=True)
class Export:
    """Stands for a candidate's row in the ledger."""

    export_path: str
    export_sha256: str


def checkpoint(root: Path) -> Path:
    return checkpoints.save_checkpoint(root, Checkpoint({"w": torch.zeros(2)}, {"m": torch.zeros(2)}, {"step": 4}))


def export(root: Path) -> Path:
    return save_export(tiny_model(0), root / "export", tokenizer())


def of_a_checkpoint(root: Path, deep: bool) -> Callable[[], object]:
    path = checkpoint(root)
    row = {"path": str(path), "id": hash_manifest(path)}
    return lambda: find_checkpoint_damage(row, deep)


def of_an_export(root: Path) -> Callable[[], object]:
    path = export(root)
    row = cast(Any, Export(str(path), hash_export_folder(path)))
    return lambda: find_export_damage(row, deep=True)


def of_a_replica(root: Path) -> Callable[[], object]:
    path = checkpoint(root / "checkpoints")
    result = f'{{"last_step": 4, "checkpoint": "{path}", "manifest_sha256": "", "loss": 1.0, "steps": 4}}'
    (root / "result.json").write_text(result)

    runs, arm = SimpleNamespace(find_arm_folder=lambda arm: root), SimpleNamespace(last_step=4)
    return lambda: train_replicas._fault(cast(Any, runs), cast(Any, arm))


def of_a_run(root: Path) -> Callable[[], object]:
    plan: dict[str, Any] = {"token_shards": []}
    arm = Arm(
        "a", {"recipe": {}, "data_plan": plan, "first_step": 0, "last_step": 4, "initial_checkpoint": None}, "c0ffee"
    )
    prepare_arm_folder(root, root / "run", arm)
    return lambda: prepare_arm_folder(root, root / "run", arm)


def of_a_shard(root: Path, name: str) -> Callable[[], object]:
    path = root / name
    path.write_bytes(b'{"text": "a"}\n')
    return lambda: list(read_rows(path, ShardLimits()))


def of_a_sample(root: Path) -> Callable[[], object]:
    path = root / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n')
    policy = DataPolicy.load(ROOT / "policies" / "data.yaml")
    return lambda: list(vocabulary._sample_file(path, policy, 100))


def of_a_token_shard(root: Path) -> Callable[[], object]:
    shard = write_token_shard(root, make_documents(1, {"docs": 3}), vocab_size=512, tokenizer_sha256="t" * 64)
    return lambda: find_token_shard_damage(shard.path, deep=True)


def of_json(root: Path) -> Callable[[], object]:
    path = root / "config.json"
    path.write_text("{}")
    return lambda: read_json(path)


def of_tensors(root: Path) -> Callable[[], object]:
    path = export(root)
    return lambda: hash_export_tensors(path)


READS: dict[str, Callable[[Path], Callable[[], object]]] = {
    "a checkpoint": lambda root: of_a_checkpoint(root, False),
    "a checkpoint's files": lambda root: of_a_checkpoint(root, True),
    "an export": of_an_export,
    "an export's config": of_json,
    "an export's tensors": of_tensors,
    "a replica": of_a_replica,
    "a certificate's run": of_a_run,
    "a token shard": of_a_token_shard,
    "a shard": lambda root: of_a_shard(root, "a.jsonl"),
    "a compressed shard": lambda root: of_a_shard(root, "a.jsonl.gz"),
    "a shard, for the vocabulary": of_a_sample,
    "a Parquet shard": lambda root: of_a_shard(root, "a.parquet"),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_without_file_handles_is_a_fault_of_the_machine(tmp_path: Path, name: str) -> None:
    read = READS[name](tmp_path)
    before = said(read)
    kept = sorted(tmp_path.rglob("*"))
    with few_handles(), pytest.raises(Exception) as raised:
        read()
    assert find_fault_in(raised.value) == NO_FILE_HANDLES, raised.value
    assert not isinstance(raised.value, ExportError | ShardProblem), "such an error blames the candidate or the shard"
    assert said(read) == before and sorted(tmp_path.rglob("*")) == kept


def said(read: Callable[[], object]) -> str:
    """The result of a read, or the text of its error (a file that is not Parquet)."""
    try:
        return str(read())
    except Exception as error:
        assert find_fault_in(error) is None
        return str(error)
