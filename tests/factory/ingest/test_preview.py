"""``factory ingest --preview`` shows the rows as an ingest would store them, and stores nothing."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from factory.core.workspace import Workspace
from factory.ingest.inbox import ingest_path
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from tests.support.factory.command import command_here
from tests.support.factory.made_up_text import prose, use_policy, use_small_vocabulary

pytestmark = pytest.mark.usefixtures("ledger")
FIELDS = 'fields:\n  - {files: "*.csv", text: "{heading}\\n\\n{body}", license: rights, domain: "=manual"}\n'


def table(path: Path, rows: int) -> Path:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["heading", "body", "rights", "score"])
        writer.writerows([f"Part {i}", prose(i) if i else "short", "MIT", "nan"] for i in range(rows))
    return path


def previewed(workspace: Workspace, *words: str) -> dict[str, Any]:
    done = command_here("ingest", "--preview", "--json", *words, home=workspace)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def everything(workspace: Workspace) -> set[str]:
    return {str(path) for path in workspace.root.rglob("*") if not path.name.startswith("ledger.db")}


def test_a_preview_reads_a_file_as_ingest_does_and_stores_nothing(
    workspace: Workspace, ledger: Ledger, tmp_path: Path
) -> None:
    use_small_vocabulary(workspace)
    path, before = table(tmp_path / "manual.csv", 40), everything(workspace)
    [without] = previewed(workspace, str(path))["files"]
    assert without["counts"]["unread"] == {"heading": 40, "rights": 40, "score": 40}
    assert without["shown"][0]["text"] == prose(1).strip() and without["shown"][0]["license"] is None
    with open(workspace.policy_path("data.yaml"), "a", encoding="utf-8") as policy:
        policy.write(FIELDS)
    [mapped] = previewed(workspace, str(path))["files"]
    assert (mapped["rows"], mapped["whole"]) == (40, True)
    assert mapped["shown"][0] | {"text": ""} == {
        "row": 1, "id": None, "domain": "manual", "source": None, "license": "MIT", "group": None, "text": "",
    }  # fmt: skip
    assert mapped["shown"][0]["text"] == f"Part 1\n\n{prose(1)}".strip()
    assert everything(workspace) == before and ledger.read("SELECT COUNT(*) AS n FROM documents") == [{"n": 0}]

    [report] = ingest_path(Plant(workspace, ledger), path, workers=0)
    assert report.counts["dropped"] == mapped["counts"]["dropped"] == {"too_short": 1}
    assert report.counts["unread"] == mapped["counts"]["unread"]
    assert report.counts["train"] + report.counts["held_out"] == mapped["counts"]["train"] == 39


def test_a_preview_shows_each_turn_of_a_chat_and_which_turns_carry_loss(workspace: Workspace, tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "Hi\nthere"},
        {"from": "gpt", "value": "Hello", "weight": 0},
        {"from": "gpt", "value": prose(1)},
    ]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"conversations": turns, "source": "s"}) + "\n")
    said = command_here("ingest", "--preview", str(tmp_path / "chats.jsonl"), home=workspace).stdout.splitlines()
    lines = [line.strip() for line in said]
    assert any(line.startswith("chats.jsonl: 1 row was read; 1 would") for line in lines)
    assert any(line.startswith("row 0: domain chat, source s,") for line in lines)
    assert lines.index("user: Hi there") + 1 == lines.index("assistant: Hello")
    assert any(line.startswith("assistant (loss): ") for line in lines)


def test_a_preview_of_a_long_file_reads_only_its_first_rows(workspace: Workspace, tmp_path: Path) -> None:
    [found] = previewed(workspace, str(table(tmp_path / "long.csv", 1200)))["files"]
    assert (found["rows"], found["whole"]) == (1000, False)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--again", "a.csv"], "needs the names of files"),
        ([], "needs the names of files"),
        (["b.csv"], "no row has the column 'heading'"),
        (["a.pdf"], "extract the text first"),
    ],
)
def test_a_file_that_cannot_be_previewed_is_an_error(
    words: list[str], why: str, workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    (tmp_path / "b.csv").write_text("title,body\na,b\n")
    use_policy(workspace, FIELDS)
    done = command_here("ingest", "--preview", *words, home=workspace)
    assert done.exit_code != 0 and why in str(done.exception)
