"""A tokenizer that is gone or damaged comes back, and no shard is blamed for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable

import pytest

from factory.backups.backups import make_backup
from factory.core.errors import FactoryError
from factory.core.workspace import Workspace
from factory.duties.runner import work
from factory.ingest.inbox import take
from factory.ingest.tokenizer import FILES
from factory.ledger.files import held
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.repairs.mending import repair_all, with_mending
from factory.repairs.token_shards import tokenizer_fault
from factory.retrying.asking import PausedError, pause
from tests.support.file_hashes import file_hashes
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
def test_doctor_puts_the_recorded_tokenizer_back(copied: Copy, damage: str, source: str) -> None:
    workspace, ledger = copied()
    before = file_hashes(workspace.tokenizer)
    if source == "backup":
        make_backup(Plant(workspace, ledger))
        shutil.rmtree(workspace.exports)
        workspace.exports.mkdir()
    DAMAGE[damage](workspace)
    assert str(workspace.tokenizer) in tokenizer_fault(Plant(workspace, ledger))
    lines = repair_all(workspace, False, Said())
    assert any(line.startswith("tokenizer: mended") for line in lines), lines
    assert file_hashes(workspace.tokenizer) == before and set(before) == set(FILES)
    assert not tokenizer_fault(Plant(workspace, ledger))


@pytest.mark.sample("gone")
@pytest.mark.parametrize("damage", ["gone", "another"])
def test_the_daemon_ingests_on_and_no_shard_is_held(copied: Copy, damage: str) -> None:
    workspace, ledger = copied()
    rows = [{"text": f"A new story of {n} rivers, {n} towns and what the people of them said. " * 3} for n in range(9)]
    (workspace.inbox / "later.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    DAMAGE[damage](workspace)
    said = Said()
    add_verdict(ledger, 1, "reject")  # nothing is judged here
    pause(ledger, "training", "ada")
    with pytest.raises(PausedError):
        work(Plant(workspace, ledger, said), settle=0.0)
    assert "tokenizer  is whole again" not in said.text and "tokenizer is whole again" in said.text
    assert not held(ledger) and not list(workspace.inbox.iterdir())
    assert ledger.read("SELECT state FROM shards WHERE name = 'later.jsonl'") == [{"state": "ingested"}]


def test_a_tokenizer_without_any_copy_says_what_to_do_and_blames_no_shard(copied: Copy) -> None:
    workspace, ledger = copied()
    shutil.rmtree(workspace.exports)
    workspace.exports.mkdir()
    shutil.rmtree(workspace.tokenizer)
    (workspace.inbox / "later.jsonl").write_text(json.dumps({"text": "One more line of text for a model. " * 9}) + "\n")
    with pytest.raises(FactoryError, match=r"no backup and no export holds it: put its files into .*tokenizer again"):
        with_mending(
            Plant(workspace, ledger, Said()),
            lambda: take(Plant(workspace, ledger, Said()), workspace.inbox / "later.jsonl"),
        )
    assert not held(ledger) and (workspace.inbox / "later.jsonl").exists()
