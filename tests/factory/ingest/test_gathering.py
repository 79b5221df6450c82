"""``factory ingest`` with files, folders and patterns, its exit codes, and files that wait because the text is too short to train a tokenizer."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest
import sqlalchemy as sa

from factory.core.errors import InputError
from factory.core.workspace import Workspace, find_checkout_root
from factory.ingest.input_files import gather_files
from factory.ingest.tokenizer import Tokenizer
from factory.ingest.vocabulary import TooLittleTextError
from factory.ledger.file_events import read_waiting_inbox_files
from factory.ledger.ledger import Ledger, shards, tokenizers
from factory.ledger.plant import Plant
from tests.support.factory.command import command_here
from tests.support.factory.inbox import exactly, one_pass, put, rows, trained_on
from tests.support.factory.made_up_text import prose, use_policy, use_small_vocabulary
from tests.support.messages import codes, the
from tests.support.reading.formats import dataset, zipped


def names(ledger: Ledger) -> list[str]:
    return sorted(row["name"] for row in ledger.select_rows(sa.select(shards.c.name)))


def gathered(workspace: Workspace, ledger: Ledger, *paths: Path | str) -> tuple[list[str], list[str]]:
    found = gather_files(Plant(workspace, ledger), [str(path) for path in paths])
    return [pack.name for pack in found.packs], [path.name for path in found.files]


def test_files_are_found_by_folder_pattern_and_data_set(workspace: Workspace, ledger: Ledger, tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "deep" / ".git").mkdir(parents=True)
    dataset(data / "hf")
    for name in ("a.jsonl", "deep/b.csv", "deep/c.png", "deep/noname", ".hidden.jsonl", "deep/.git/d.txt"):
        (data / name).write_bytes(b"x")
    os.mkfifo(data / "pipe.jsonl")
    (data / "deep" / "up").symlink_to(data)
    (data / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    assert gathered(workspace, ledger, data) == (["hf"], ["a.jsonl", "b.csv"])
    found = gather_files(Plant(workspace, ledger), [str(data)])
    assert the([found.describe_unsupported_files()], "ingest.kinds_left_out").data == {
        "files": 2,
        "kinds": [".png 1", "no suffix 1"],
    }
    assert gathered(workspace, ledger, f"{data}/**/*.csv") == ([], ["b.csv"])
    assert gathered(workspace, ledger, data / "hf") == (["hf"], [])
    assert gathered(workspace, ledger, data / "a.jsonl", data / "a.jsonl", data / "deep" / "c.png") == (
        [],
        ["a.jsonl", "c.png"],
    )
    for wrong, why in (
        ("nothing.jsonl", "no file nothing.jsonl was found"),
        (f"{data}/*.parquet", "no file matches"),
        ("unheard://y/z", "unheard"),
        ("", "one of the given names is empty"),
    ):
        with pytest.raises(InputError, match=why):
            gathered(workspace, ledger, wrong)


def test_many_small_files_of_a_folder_are_one_pack(workspace: Workspace, ledger: Ledger, tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / "src" / f"m{number % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / f"m{number % 3}" / f"f{number}.py").write_text(f"x = {number}")
    (tmp_path / "src" / "large.jsonl").write_bytes(b"x" * 300_000)
    found = gather_files(Plant(workspace, ledger), [str(tmp_path / "src")])
    (pack,) = found.packs
    assert pack.name == "src" and len(pack.files) == 40 and pack.files[0][0] == "m0/f0.py"
    assert [path.name for path in found.files] == ["large.jsonl"]
    assert gathered(workspace, ledger, tmp_path / "src" / "m1")[0] == []  # few of them


def test_of_many_small_files_only_those_without_a_mapped_column_are_refused(
    workspace: Workspace, ledger: Ledger, tmp_path: Path
) -> None:
    """Files given by name, and files in the inbox. They are ingested as soon as the mapping fits them."""
    use_small_vocabulary(workspace)
    policy = workspace.policy_path("data.yaml")
    use_policy(workspace, f"{policy.read_text()}\nfields: [{{files: 'f*', text: words, license: =MIT}}]\n")
    for folder in (tmp_path / "data", workspace.inbox):
        folder.mkdir(exist_ok=True)
        for number in range(40):
            column = "wrods" if number % 20 == 7 else "words"
            first = number + (100 if folder == workspace.inbox else 0)
            path = folder / f"f{number:02d}.jsonl"
            path.write_bytes(rows(first, 1).replace(b'"text"', f'"{column}"'.encode()))
            os.utime(path, (1e9, 1e9))
    done = command_here("ingest", str(tmp_path / "data"), home=workspace)
    assert done.exit_code == 0 and trained_on(ledger) == exactly(40) - Counter(["d7", "d27"]), done.output
    assert "(f07.jsonl, f27.jsonl)" in done.output
    assert "f07.jsonl is not ingested: " in done.output and "fields.0.text" in done.output
    said = one_pass(workspace, ledger)
    assert the(said.lines, "ingest.together").data["files"] == 38
    stays = [line.data for line in said.lines if codes([line]) == ["ingest.stays"]]
    assert [one["file"] for one in stays] == ["f07.jsonl", "f27.jsonl"]
    assert codes(one["why"] for one in stays) == ["shapes.no_row_has_column"] * 2
    assert sorted(path.name for path in workspace.inbox.iterdir()) == ["f07.jsonl", "f27.jsonl"]
    use_policy(workspace, policy.read_text().replace("text: words", "text: wrods"))
    done = command_here("ingest", str(tmp_path / "data"), home=workspace)
    one_pass(workspace, ledger)
    assert trained_on(ledger) == exactly(40) | Counter(f"d{number}" for number in range(100, 140))
    assert not list(workspace.inbox.iterdir())


def test_an_unreadable_file_does_not_stop_the_ingest_of_its_folder(
    workspace: Workspace, ledger: Ledger, tmp_path: Path
) -> None:
    use_small_vocabulary(workspace)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_bytes(b"nothing\n" * 20)
    (tmp_path / "data" / "b.json").write_bytes(b'[{"text": "cut')
    (tmp_path / "data" / "c.jsonl").write_bytes(rows(0, 20))
    (tmp_path / "data" / "d.jsonl").write_bytes(rows(20, 5))
    (tmp_path / "data" / "e.zip").write_bytes(zipped({"x.jsonl": rows(25, 5)}))
    (tmp_path / "data" / os.fsdecode(b"caf\xe9.jsonl")).write_bytes(rows(90, 5))
    done = command_here("ingest", str(tmp_path / "data"), home=workspace)
    assert done.exit_code == 0, done.output
    assert trained_on(ledger) == exactly(30)
    assert "3 shards: " in done.output and "2 quarantined; 1 not ingested" in done.output
    assert "the name is not UTF-8" in done.output and "cut off after 0 complete items" in done.output


def test_content_that_was_ingested_before_is_reported_with_its_name(
    workspace: Workspace, ledger: Ledger, tmp_path: Path
) -> None:
    use_small_vocabulary(workspace)
    (tmp_path / "a.jsonl").write_bytes(rows(0, 30))
    (tmp_path / "b.jsonl").write_bytes(rows(0, 30))
    (tmp_path / "c.csv").write_text("text\n" + prose(90))
    first = command_here("ingest", str(tmp_path / "a.jsonl"), str(tmp_path / "c.csv"), home=workspace).output
    assert "already" not in first and "2 shards: 24 " in first and ", 16 held out\n" in first
    again = command_here("ingest", *(str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.csv")), home=workspace)
    assert again.exit_code == 0, again.output
    found = re.findall(r"  (\S+) was already ingested on 20\d\d-\d\d-\d\d \d\d:\d\d as (\S+), with", again.output)
    assert found == [("a.jsonl", "a.jsonl"), ("b.jsonl", "a.jsonl"), ("c.csv", "c.csv#1.jsonl.zst")]
    assert "0 shards: 0 " in again.output and "3 ingested before" in again.output
    put(workspace, rows(0, 30), "d.jsonl")
    known = the(one_pass(workspace, ledger).lines, "ingest.known").data
    assert (known["file"], known["shard"], known["train"] + known["held_out"]) == ("d.jsonl", "a.jsonl", 30)


def test_no_vocabulary_is_made_if_all_text_is_held_out(workspace: Workspace, ledger: Ledger, tmp_path: Path) -> None:
    use_small_vocabulary(workspace)
    (tmp_path / "a.jsonl").write_bytes(rows(0, 2))
    done = command_here("ingest", "--small-vocabulary", str(tmp_path / "a.jsonl"), home=workspace)
    assert isinstance(done.exception, InputError) and done.exception.code == "ingest.all_held_out"
    assert not ledger.select_rows(sa.select(tokenizers))


def test_a_broken_data_set_does_not_stop_the_ingest_of_its_folder(
    workspace: Workspace, ledger: Ledger, tmp_path: Path
) -> None:
    use_small_vocabulary(workspace)
    for folder, state in (("broken", {"_data_files": [{"filename": "gone.arrow"}]}), ("app", {"page": 3})):
        (tmp_path / "data" / folder).mkdir(parents=True)
        (tmp_path / "data" / folder / "state.json").write_text(json.dumps(state))
    (tmp_path / "data" / "app" / "a.jsonl").write_bytes(rows(0, 20))
    done = command_here("ingest", str(tmp_path / "data"), home=workspace)
    assert done.exit_code == 0 and trained_on(ledger) == exactly(20), done.output
    assert "gone.arrow" in done.output and "1 not ingested" in done.output


def test_files_of_one_name_in_two_folders_are_told_apart(workspace: Workspace, ledger: Ledger, tmp_path: Path) -> None:
    use_small_vocabulary(workspace)
    policy = workspace.root / "policies" / "data.yaml"
    use_policy(workspace, f"{policy.read_text()}\nfields: [{{files: '*', text: words, license: =MIT}}]\n")
    words = rows(0, 30).replace(b'"text"', b'"words"').splitlines(keepends=True)
    for folder, content in (("a", rows(40, 2)), ("b", b"".join(words[:15])), ("c", b"".join(words[15:]))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.jsonl").write_bytes(content)
    assert workspace.root.is_relative_to(tmp_path)  # and is not read
    done = command_here("ingest", str(tmp_path), home=workspace)
    assert "not supported" not in done.output
    assert done.exit_code == 0 and f"1 not ingested ({tmp_path / 'a' / 'x.jsonl'})" in done.output, done.output
    assert trained_on(ledger) == exactly(30)


@pytest.mark.parametrize("name", ["a.jsonl", "a.zip"])
def test_the_exit_code_is_not_zero_if_nothing_was_ingested(
    workspace: Workspace, ledger: Ledger, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(b'"\n' * 20)
    done = command_here("ingest", str(tmp_path / name), home=workspace)
    assert done.exit_code != 0 and "QUARANTINED" in done.output
    assert isinstance(done.exception, InputError) and done.exception.exit_code == 2
    assert "1 file is quarantined, 0 files could not be ingested" in str(done.exception)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "y.png").write_bytes(b"")
    assert "1 file has an unknown format" in str(command_here("ingest", str(tmp_path / "x"), home=workspace).exception)
    as_json = command_here("ingest", str(tmp_path / name), "--json", home=workspace)
    assert json.loads(as_json.output)[0]["state"] == "quarantined" and as_json.exit_code != 0


# -- a tokenizer by accident -------------------------------------------------------------------------------------------
def wants(workspace: Workspace, vocabulary: int) -> None:
    use_policy(
        workspace,
        (find_checkout_root() / "policies" / "data.yaml")
        .read_text()
        .replace("vocab_size: 4096", f"vocab_size: {vocabulary}"),
    )


def test_one_line_of_text_does_not_freeze_a_vocabulary(workspace: Workspace, ledger: Ledger) -> None:
    """The file waits in the inbox until more text arrives, and is ingested then."""
    wants(workspace, 2000)
    put(workspace, b"A line of text, of which no vocabulary can be made: it is short.", "a.txt")
    said = one_pass(workspace, ledger)
    line = the(said.lines, "ingest.stays")
    why = the([line.data["why"]], "ingest.little_text").data
    assert line.data["file"] == "a.txt" and (why["characters"], why["wanted"]) == (64, 2000)
    assert line.endswith("'factory ingest --small-vocabulary'")
    assert not ledger.select_rows(sa.select(tokenizers)) and not (workspace.tokenizer / "tokenizer.json").exists()
    assert not one_pass(workspace, ledger).about("stays in the inbox") and "a.txt" in read_waiting_inbox_files(
        ledger
    )  # it is not tried in each pass
    put(workspace, rows(0, 200), "b.jsonl")
    one_pass(workspace, ledger)
    assert names(ledger) == ["a.txt", "b.jsonl"] and Tokenizer.load(workspace.tokenizer).vocab_size == 2000
    assert not list(workspace.inbox.iterdir())


def test_a_person_can_allow_a_small_vocabulary(workspace: Workspace, ledger: Ledger, tmp_path: Path) -> None:
    put(workspace, b"A line of text, of which no vocabulary can be made: it is short.", "a.txt")
    assert "ingest.stays" in codes(one_pass(workspace, ledger).lines)
    said = json.loads(command_here("ingest", "--small-vocabulary", "--json", home=workspace).stdout)
    assert said["files"] == [] and "next ingest" in said["says"]["text"]
    one_pass(workspace, ledger)
    assert names(ledger) == ["a.txt"] and Tokenizer.load(workspace.tokenizer).vocab_size < 400


def test_the_text_of_all_named_files_counts_for_the_vocabulary(
    workspace: Workspace, ledger: Ledger, tmp_path: Path
) -> None:
    wants(workspace, 2000)
    paths = [tmp_path / f"{name}.txt" for name in "abcdefgh"]
    for number, path in enumerate(paths):
        path.write_text("\n".join(prose(number * 10 + n) for n in range(12)))
    alone = command_here("ingest", str(paths[-1]), home=workspace)
    assert alone.exit_code != 0 and isinstance(alone.exception, TooLittleTextError)
    done = command_here("ingest", *map(str, paths), home=workspace)
    assert done.exit_code == 0 and len(names(ledger)) == 8, done.output
    assert "8 shards" in done.output
