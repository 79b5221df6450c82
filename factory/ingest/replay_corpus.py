"""Ingests the folder ``replay_corpus`` of ``data.yaml``: documents that stand for what an imported model knew, as the domain 'replay'.

A model that is trained further on new data keeps more of what it knew if some of each batch is like its old data (experience replay: arXiv 2403.08763
§6). Its old data are seldom at hand, so that a person gives documents that are like them. They are a domain like any other: the recipe's
``mixture.weights.replay`` is their share, and their held-out part is a guard for each candidate.

The folder is read once. Its files stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.ingest.chain import ShardReport
from factory.ingest.file_groups import FileGroup, ingest_file_group
from factory.ingest.input_files import gather_files
from factory.ingest.rules.policy import REPLAY_DOMAIN, DataPolicy
from factory.ledger.ledger import record_event
from factory.ledger.plant import Plant
from kernels.contract.message import Message

INGESTED = "replay_ingested"  # {folder, shards}: all files of the folder were read


def find_replay_corpus(workspace: Workspace) -> Path | None:
    """The folder that ``data.yaml`` names; None if it names none. Raises: ConfigError."""
    named = DataPolicy.load(workspace.policy_path("data.yaml")).replay_corpus
    return (workspace.root / Path(named).expanduser()).resolve() if named else None


def find_waiting_replay_corpus(plant: Plant) -> Path | None:
    """The folder if it was not ingested yet. Raises: ConfigError."""
    if b"replay_corpus" not in plant.workspace.policy_path("data.yaml").read_bytes():
        return None  # the daemon asks after each errand
    folder = find_replay_corpus(plant.workspace)
    known = plant.ledger.read("SELECT detail FROM events WHERE kind = :kind", kind=INGESTED) if folder else []
    stored = plant.ledger.to_stored_path(folder) if folder else ""
    return None if stored in [row["detail"]["folder"] for row in known] else folder


def ingest_replay_corpus(
    plant: Plant, folder: Path, ingested: Callable[[str, ShardReport], object] = lambda name, report: None
) -> list[ShardReport]:
    """Ingest all files of the folder that can be read. ``ingested`` is called with a name and the report of each shard. Safe to repeat.

    Raises: InputError if the folder or a document in it is missing; as ``ingest_file_group``. What was ingested before stays.
    """
    if not folder.is_dir():
        raise InputError(
            "ingest.no_replay_corpus",
            "{folder}, the replay_corpus of data.yaml, is no folder. Correct the path in {policy}.",
            folder=folder,
            policy=plant.workspace.policy_path("data.yaml"),
        )
    found = gather_files(plant, [str(folder)])
    packs = [replace(pack, domain=REPLAY_DOMAIN) for pack in [*found.packs, *map(FileGroup.of_file, found.files)]]
    reports = []
    for pack in packs:
        own = replace(pack, name=f"{REPLAY_DOMAIN}-{pack.name}")  # the shards' name
        reports += ingest_file_group(plant, own, ingested=lambda report, name=own.name: ingested(name, report))  # type: ignore[misc]
    if not any(report.state == "ingested" for report in reports):
        raise InputError(
            "ingest.empty_replay_corpus",
            "{folder}, the replay_corpus of data.yaml, holds no document that can be read. {left_out}",
            folder=folder,
            left_out=found.describe_unsupported_files(),
        )
    with plant.ledger.begin() as tx:
        detail = {"folder": plant.ledger.to_stored_path(folder), "shards": [report.sha256 for report in reports]}
        record_event(tx, INGESTED, "replay_corpus", detail)
    train, held = (sum(report.counts.get(key, 0) for report in reports) for key in ("train", "held_out"))
    plant.progress.line(
        Message(
            "ingest.replay_corpus",
            "  The domain {domain} has {train:,|document|documents} of {folder} to train on, and {held_out:,} held out.",
            domain=REPLAY_DOMAIN,
            train=train,
            folder=folder,
            held_out=held,
        )
    )
    return reports
