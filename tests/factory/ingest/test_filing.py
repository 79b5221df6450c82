"""When filed and quarantined files return to the inbox. Files, the ledger and the tokenizer are real."""

from __future__ import annotations

import os
from functools import partial

import pytest
import sqlalchemy as sa

from factory.core.workspace import Workspace, find_checkout_root
from factory.ingest import filing
from factory.ingest.filing import make_stored_file_name
from factory.ledger.ledger import Ledger, events, shards
from tests.support.factory.at_work import at_work
from tests.support.factory.command import command_here, factory
from tests.support.factory.inbox import exactly, one_pass, put, rows, trained_on
from tests.support.factory.made_up_text import use_policy, use_small_vocabulary
from tests.support.messages import codes, the
from trainer.contract.data.token_shard import hash_file

LONG_AGO = 3600.0


@pytest.fixture(autouse=True)
def small_vocabulary(workspace: Workspace) -> None:
    use_small_vocabulary(workspace)


def test_rows_appended_after_filing_are_ingested_as_another_shard(workspace: Workspace, ledger: Ledger) -> None:
    put(workspace, rows(0, 20))
    one_pass(workspace, ledger)
    (filed,) = (workspace.shards / "raw").iterdir()
    before = filed.read_bytes()
    with open(filed, "ab") as late:  # it was open on another machine
        late.write(rows(20, 7))
        late.flush()
        assert "ingest.changed_after" in codes(one_pass(workspace, ledger).lines)
        late.write(rows(27, 3))  # goes where the file went
    assert filed.read_bytes() == before
    one_pass(workspace, ledger, settle=0)
    assert trained_on(ledger) == exactly(30)
    assert one_pass(workspace, ledger, settle=0).lines == []


def test_a_filed_shard_whose_first_rows_changed_returns_to_the_inbox(workspace: Workspace, ledger: Ledger) -> None:
    put(workspace, rows(0, 20))
    one_pass(workspace, ledger)
    (filed,) = (workspace.shards / "raw").iterdir()
    filed.write_bytes(rows(5, 25))  # the ingested content is not the file's first part any more
    assert "ingest.changed_after_and_lost" in codes(one_pass(workspace, ledger).lines)
    assert not filed.exists() and len(list(workspace.inbox.iterdir())) == 1
    one_pass(workspace, ledger, settle=0)
    assert trained_on(ledger) == exactly(30)


def test_a_filed_shard_is_watched_even_if_the_clock_jumps(workspace: Workspace, ledger: Ledger) -> None:
    put(workspace, rows(0, 20))
    one_pass(workspace, ledger)
    with ledger.begin() as tx:
        tx.execute(events.update().values(at=events.c.at + 1e9))
    (filed,) = (workspace.shards / "raw").iterdir()
    filed.write_bytes(rows(0, 25))
    assert "ingest.changed_after" in codes(one_pass(workspace, ledger).lines)


def test_only_the_newest_filed_shards_are_watched(
    workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filing, "MOST_WATCHED_FILES", 1)
    for name in ("a.jsonl", "b.jsonl"):
        put(workspace, rows(ord(name[0]), 20), name)
        one_pass(workspace, ledger)
    older, newer = (path for end in ("a", "b") for path in (workspace.shards / "raw").glob(f"*-{end}.jsonl"))
    for path in (older, newer):
        path.write_bytes(path.read_bytes() + rows(500, 5))
    said = one_pass(workspace, ledger)
    assert the(said.lines, "ingest.changed_after").data["file"] == newer.name and not said.about(older.name)


def test_a_filed_shard_with_only_a_new_mtime_stays(workspace: Workspace, ledger: Ledger) -> None:
    put(workspace, rows(0, 20))
    one_pass(workspace, ledger)
    (filed,) = (workspace.shards / "raw").iterdir()
    os.utime(filed)
    assert one_pass(workspace, ledger).lines == [] and filed.exists()
    count = len(ledger.select_rows(sa.select(events.c.id)))
    assert one_pass(workspace, ledger).lines == [] and len(ledger.select_rows(sa.select(events.c.id))) == count


def quarantined(ledger: Ledger) -> list[str]:
    return [row["name"] for row in ledger.select_rows(sa.select(shards.c.name).where(shards.c.state == "quarantined"))]


def tries(ledger: Ledger) -> int:
    return len(ledger.select_rows(sa.select(events.c.id).where(events.c.kind == "quarantined")))


def test_a_quarantined_file_is_tried_again_after_a_rename(workspace: Workspace, ledger: Ledger) -> None:
    put(workspace, rows(0, 20), "a.jason")
    one_pass(workspace, ledger)
    assert quarantined(ledger) == ["a.jason"]
    assert one_pass(workspace, ledger).lines == [] and tries(ledger) == 1
    (file,) = workspace.quarantine.iterdir()
    file.rename(workspace.quarantine / "a.jsonl")
    assert the(one_pass(workspace, ledger).lines, "ingest.readable_now").data["file"] == "a.jsonl"
    assert quarantined(ledger) == [] and trained_on(ledger) == exactly(20) and not list(workspace.quarantine.iterdir())


def test_a_quarantined_file_that_is_put_back_under_another_name_is_ingested(
    workspace: Workspace, ledger: Ledger
) -> None:
    put(workspace, rows(0, 20), "a.jason")
    one_pass(workspace, ledger)
    put(workspace, rows(0, 20), "a.jsonl")
    one_pass(workspace, ledger)
    assert trained_on(ledger) == exactly(20) and quarantined(ledger) == []


def test_a_quarantined_copy_of_a_file_still_in_the_inbox_is_not_tried_too(workspace: Workspace, ledger: Ledger) -> None:
    path = put(workspace, b"nothing\n" * 30)  # killed between the copy and the transaction that names it
    copy = workspace.quarantine / make_stored_file_name(hash_file(path), path)
    copy.write_bytes(path.read_bytes())
    one_pass(workspace, ledger)
    assert tries(ledger) == 1 and list(workspace.quarantine.iterdir()) == [copy] and not list(workspace.inbox.iterdir())


def test_a_repaired_quarantined_file_is_tried_again(workspace: Workspace, ledger: Ledger) -> None:
    put(workspace, b"nothing\n" * 30 + rows(0, 9))
    one_pass(workspace, ledger)
    (file,) = workspace.quarantine.iterdir()
    file.write_bytes(rows(0, 9))
    one_pass(workspace, ledger, settle=0)
    assert trained_on(ledger) == exactly(9)


def test_a_quarantined_file_is_tried_again_after_the_policy_changed(workspace: Workspace, ledger: Ledger) -> None:
    put(workspace, b"nothing\n" * 30 + rows(0, 17))
    one_pass(workspace, ledger)
    assert tries(ledger) == 1
    shipped = (
        (find_checkout_root() / "policies" / "data.yaml").read_text().replace("vocab_size: 4096", "vocab_size: 400")
    )
    use_policy(workspace, shipped + "\nlimits:\n  max_bad_rows: 0.9\n")
    one_pass(workspace, ledger)
    assert trained_on(ledger) == exactly(17) and quarantined(ledger) == []


def test_a_person_can_have_a_quarantined_file_tried_again(workspace: Workspace, ledger: Ledger) -> None:
    ingest = partial(command_here, "ingest", home=workspace)
    nothing = ingest().exception
    assert nothing is not None and codes([nothing]) == ["ingest.no_shards"]
    assert "No file is in quarantine" in ingest("--again").stdout
    put(workspace, b"nothing\n" * 30 + rows(0, 9))
    one_pass(workspace, ledger)
    (file,) = workspace.quarantine.iterdir()
    assert "QUARANTINED" in ingest("--again").stdout
    assert tries(ledger) == 2 and list(workspace.quarantine.iterdir()) == [file] and not list(workspace.inbox.iterdir())
    assert "QUARANTINED" in ingest("--again", file.name).stdout and tries(ledger) == 3
    assert "no file other.jsonl was found" in str(ingest("--again", "other.jsonl").exception)


def test_a_request_to_retry_a_quarantined_file_is_left_to_a_running_daemon(
    workspace: Workspace, ledger: Ledger
) -> None:
    home = ("--workspace", str(workspace.root))
    with at_work(workspace):
        assert factory("ingest", "--again", *home).stdout == "  No file is in quarantine.\n"
    put(workspace, b"nothing\n" * 30)
    one_pass(workspace, ledger)
    (file,) = workspace.quarantine.iterdir()
    for words in (["--again"], ["--again", file.name]):
        count = tries(ledger)
        with at_work(workspace):
            said = factory("ingest", *words, *home)
        assert said.returncode == 0 and "tries 1 quarantined file again" in " ".join(said.stdout.split())
        assert tries(ledger) == count and list(workspace.quarantine.iterdir()) == [file]
        lines = one_pass(workspace, ledger).lines
        assert codes(lines) == ["ingest.asked_again", "ingest.shard"] and lines[0].data["file"] == "a.jsonl"
        assert "QUARANTINED" in lines[1]
        assert tries(ledger) == count + 1 and quarantined(ledger) == ["a.jsonl"]
        assert not one_pass(workspace, ledger).lines, "once"


def test_a_file_with_two_names_after_a_killed_return_is_ingested_once(workspace: Workspace, ledger: Ledger) -> None:
    path = put(workspace, rows(0, 20))
    os.link(path, workspace.inbox / "b.jsonl")
    one_pass(workspace, ledger)
    assert trained_on(ledger) == exactly(20) and not list(workspace.inbox.iterdir())
