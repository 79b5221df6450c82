"""A missing or damaged tokenizer is restored, and no shard is held because of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable

import pytest

from factory.backups.backups import make_backup
from factory.core.errors import FactoryError
from factory.core.workspace import Workspace
from factory.duties.runner import run_duty_pass
from factory.ingest.inbox import ingest_inbox_file
from factory.ingest.tokenizer import FILES
from factory.ledger.file_events import read_waiting_inbox_files
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.repairs.repairing import call_and_repair_on_failure, repair_all_damage
from factory.repairs.token_shards import find_tokenizer_damage
from factory.retrying.daemon_requests import PausedError, pause_daemon
from tests.support.file_hashes import file_hashes
from tests.support.messages import codes, refused, the
from tests.support.plants.release_scene import add_verdict
from tests.support.said import Said

Copy = Callable[[], tuple[Workspace, Ledger]]
DAMAGE: dict[str, Callable[[Workspace], object]] = {
    "gone": lambda workspace: shutil.rmtree(workspace.tokenizer),
    "another": lambda workspace: (workspace.tokenizer / "tokenizer.json").open("a").write(" "),
    "half": lambda workspace: (workspace.tokenizer / "tokenizer_config.json").write_text("{"),
    "empty": lambda workspace: (workspace.tokenizer / "chat_template.jinja").write_text(""),
}


@pytest.mark.parametrize(("damage", "source"), [("gone", "export"), *((damage, "backup") for damage in DAMAGE)])
def test_check_repair_restores_the_recorded_tokenizer(copied: Copy, damage: str, source: str) -> None:
    workspace, ledger = copied()
    before = file_hashes(workspace.tokenizer)
    if source == "backup":
        make_backup(Plant(workspace, ledger))
        shutil.rmtree(workspace.exports)
        workspace.exports.mkdir()
    DAMAGE[damage](workspace)
    assert str(workspace.tokenizer) in find_tokenizer_damage(Plant(workspace, ledger))
    lines = repair_all_damage(workspace, False, Said())
    assert "tokenizer" in [line.data["name"] for line in lines if codes([line]) == ["repairing.repaired"]]  # type: ignore[attr-defined]
    assert file_hashes(workspace.tokenizer) == before and set(before) == set(FILES)
    assert not find_tokenizer_damage(Plant(workspace, ledger))


@pytest.mark.sample("gone")
@pytest.mark.parametrize("damage", ["gone", "another"])
def test_the_daemon_restores_the_tokenizer_and_holds_no_shard(copied: Copy, damage: str) -> None:
    workspace, ledger = copied()
    rows = [{"text": f"A new story of {n} rivers, {n} towns and what the people of them said. " * 3} for n in range(9)]
    (workspace.inbox / "later.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    DAMAGE[damage](workspace)
    said = Said()
    add_verdict(ledger, 1, "reject")  # nothing is judged here
    pause_daemon(ledger, "training", "ada")
    with pytest.raises(PausedError):
        run_duty_pass(Plant(workspace, ledger, said), settle=0.0)
    assert "tokenizer  is repaired" not in said.text and "tokenizer is repaired" in said.text
    assert not read_waiting_inbox_files(ledger) and not list(workspace.inbox.iterdir())
    assert ledger.read("SELECT state FROM shards WHERE name = 'later.jsonl'") == [{"state": "ingested"}]


def test_a_lost_tokenizer_without_a_copy_is_an_error_and_no_shard_is_held(copied: Copy) -> None:
    workspace, ledger = copied()
    shutil.rmtree(workspace.exports)
    workspace.exports.mkdir()
    shutil.rmtree(workspace.tokenizer)
    (workspace.inbox / "later.jsonl").write_text(json.dumps({"text": "One more line of text for a model. " * 9}) + "\n")
    with refused("repairing.failed", FactoryError) as raised:
        call_and_repair_on_failure(
            Plant(workspace, ledger, Said()),
            lambda: ingest_inbox_file(Plant(workspace, ledger, Said()), workspace.inbox / "later.jsonl"),
        )
    why = the([raised.value.data["why"]], "token_shards.no_tokenizer_copy")
    assert why.data["folder"] == workspace.tokenizer
    assert not read_waiting_inbox_files(ledger) and (workspace.inbox / "later.jsonl").exists()
