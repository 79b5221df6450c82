"""``fields`` of ``data.yaml``: the mapping of columns, its errors, and the report about how rows were read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from factory.core.errors import ConfigError, InputError
from factory.core.workspace import Workspace
from factory.ingest.chain import ShardReport
from factory.ingest.document import BadRow, parse_document
from factory.ingest.inbox import describe_shard
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.shapes.chats import ReadingNotes
from factory.ingest.shapes.field_mapping import FieldMapping
from factory.ledger.ledger import Ledger, documents, shards
from factory.show.pages.provenance import read_document_provenance
from kernels.contract.message import Message
from tests.support.factory.made_up_text import prose, use_policy
from tests.support.messages import codes, refused, the
from tests.support.paths import ROOT

MINE = {"title": "T", "body": {"words": "W"}, "meta": {"lang": "en", "by": "Ann", "n": 3}, "talk": [{"from": "human", "value": "Why?"}],
        "q": "Why?", "a": "So.", "licences": ["MIT", "CC0"], "where": "https://example.org/a", "thread": 12}  # fmt: skip
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So. (en)"},
]


def parsed(**mapping: object) -> dict[str, object]:
    notes = ReadingNotes()
    found = parse_document(MINE, "text", FieldMapping.model_validate({"files": "*", **mapping}), notes)
    return {**vars(found), "unread": notes.unread_fields}


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({"text": "{title}\n\n{body.words}"}, {"content": {"text": "T\n\nW"}, "domain": "text"}),
        ({"text": "body.words", "domain": "=prose", "source": "{meta.by}/{meta.n}"}, {"domain": "prose", "source": "Ann/3"}),
        ({"text": "title", "domain": "meta.lang", "license": "licences", "id": "thread"}, {"domain": "en", "license": "MIT AND CC0", "id": "12"}),
        ({"text": "title", "source": "meta.n", "synthetic_by": "=judge-1"}, {"source": "3", "synthetic_by": "judge-1"}),
        ({"text": "title", "source": "meta.nobody"}, {"source": None}),
        ({"prompt": "q", "completion": "{a} ({meta.lang})", "system": "=Be short."}, {"content": {"messages": CHAT}, "domain": "chat"}),
        ({"text": "talk.0.value"}, {"content": {"text": "Why?"}, "unread": {"title", "body", "meta", "q", "a", "licences", "where", "thread"}}),
        ({"text": "title", "source": "body.words", "url": "where", "conversation": "thread"}, {"unread": {"meta", "talk", "q", "a", "licences"}}),
    ],
)  # fmt: skip
def test_a_mapping_names_the_meaning_of_each_column(mapping: dict[str, object], expected: dict[str, object]) -> None:
    found = parsed(**mapping)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("mapping", "code", "data"),
    [
        ({"text": "meta.n"}, "ingest.text_type", {"kind": "int"}),
        ({"text": "nobody"}, "shapes.no_column", {"columns": ("nobody",), "key": "text"}),
        ({"text": "{title} {meta}"}, "shapes.template_value", {"column": "meta", "kind": "dict"}),
        ({"messages": "talk"}, "shapes.no_answer", {}),
        (
            {"text": "title", "source": "meta"},
            "ingest.row_name",
            {"key": "source", "limit": 1000, "value": "it is dict"},
        ),
    ],
)
def test_a_row_is_dropped_if_a_column_cannot_have_its_meaning(
    mapping: dict[str, object], code: str, data: dict[str, Any]
) -> None:
    with refused(code, BadRow, **data):
        parsed(**mapping)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("[{files: '*', txt: a}]", "unknown key 'fields.0.txt'; did you mean 'text'?"),
        ("[{text: a}]", "key 'fields.0.files' is missing"),
        ("[{files: 'a/*.csv', text: a}]", "'a/*.csv' has a folder"),
        ("[{files: '*', text: a, messages: b}]", "'text' and 'messages' are both mapped"),
        ("[{files: '*', prompt: a}]", "one of 'prompt' and 'completion' is missing"),
        ("[{files: '*', text: =a}]", "'=a' names no column"),
        ("[{files: '*', text: '{a'}]", "'{a' has a brace without its other half"),
        ("[{files: '*', text: ''}]", "the value is empty"),
        ("[{files: '*', text: a, system: b}]", "only a chat has a system turn"),
        ("[{files: '*', ignore: [tool]}]", "fields.0.ignore.0"),
    ],
)
def test_an_invalid_mapping_is_refused_with_one_line(tmp_path: Path, fields: str, said: str) -> None:
    (tmp_path / "data.yaml").write_text(f"fields: {fields}\n")
    with pytest.raises(ConfigError, match="data.yaml") as caught:
        DataPolicy.load(tmp_path / "data.yaml")
    assert said in str(caught.value) and "\n" not in str(caught.value)


Ingest = Callable[..., ShardReport]
POLICY = "tokenizer: {vocab_size: 400}\nfields:\n  - {files: 'mine*', text: TEXT, license: =MIT}\n  - {files: '*', source: where}\n"


def said(report: ShardReport) -> Message:
    return describe_shard(report.name, report.state, report.rows, report.counts, report.reason)


def test_a_mapped_column_that_no_row_has_is_refused_with_the_nearest_name(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    rows = [{"title": "T", "body": {"words": prose(n)}, "id": f"m{n}", "where": None} for n in range(30)] + [
        b"not json"
    ]
    use_policy(workspace, POLICY.replace("TEXT", "body.wrods"))
    near = "; did you mean 'body.words'?"
    with refused(
        "shapes.no_row_has_column", InputError, column="body.wrods", place=0, key="text", pattern="mine*", near=near
    ):
        ingest(rows, "mine-1.jsonl")
    assert not ledger.select_rows(sa.select(shards)) and not ledger.select_rows(sa.select(documents))
    # the first mapping that matches counts alone, and a column that is always empty is one that there is
    use_policy(workspace, POLICY.replace("TEXT", '"{title}: {body.words}"'))
    report = ingest(rows, "mine-1.jsonl")
    assert report.counts["train"] + report.counts["held_out"] == 30 and report.counts["dropped"] == {"bad_json": 1}
    assert "shapes.unread" not in codes(said(report).data["parts"])
    (row,) = read_document_provenance(ledger, "m7")
    assert row["license"] == "MIT" and row["tokens"] > 100
    assert ingest([{"text": prose(100 + n), "where": "w"} for n in range(20)], "other.jsonl").counts["dropped"] == {}


def test_how_rows_were_read_is_counted_and_reported_once_for_each_shard(workspace: Workspace, ingest: Ingest) -> None:
    rows = [
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": prose(n)}], "lang": "en"}
        for n in range(12)
    ]
    rows += [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "images": [1]}] * 2
    report = ingest(rows)
    assert list(report.counts["read_as"].values()) == [12]
    assert report.counts["unread"] == {"lang": 12}
    parts = said(report).data["parts"]
    assert codes(parts[2:5]) == ["shapes.read_as", "shapes.unread", "shapes.dropped"]
    assert the(parts, "shapes.read_as").data["rows"] == 12 and the(parts, "shapes.unread").data["fields"] == ["lang"]
    dropped = the(parts, "shapes.dropped").data
    assert (dropped["rule"], dropped["rows"]) == ("bad_schema", 2)
    assert dropped["example"].startswith("row 12: ") and "'ignore: [images]'" in dropped["example"]


def test_a_licence_that_holds_releases_back_is_reported_at_ingest(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    names = [
        "public-domain",
        "CC0",
        "cc-by-4.0 ",
        "Apache 2.0",
        "BSD",
        "CC-BY-NC-4.0",
        None,
        "https://creativecommons.org/licenses/by/4.0/",
    ]
    rows = [{"id": f"d{n}", "text": prose(n), "license": names[n % 8]} for n in range(80)]
    report = ingest(rows)
    held = report.counts["not_releasable"]
    assert {name: one["why"] for name, one in held.items()} == {
        "": "missing",
        "BSD": "unlisted",
        "CC-BY-NC-4.0": "listed",
    }
    kept = ledger.read("SELECT license, releasable FROM documents WHERE fate = 'train'")
    assert {row["license"] for row in kept if row["releasable"]} == {*names} - {"BSD", "CC-BY-NC-4.0", None}
    assert sum(one["documents"] for one in held.values()) == sum(not row["releasable"] for row in kept)
    line = the(said(report).data["parts"], "shapes.licence_unlisted")
    assert line.data["licence"] == "BSD" and line.endswith("'BSD': {train: true, release: true}")
    allowed = DataPolicy.load(workspace.policy_path("data.yaml"))
    path = workspace.root / "policies" / "data.yaml"
    path.write_text(path.read_text().replace("  known:\n", "  known:\n    'BSD': {train: true, release: true}\n"))
    assert (
        not allowed.licences.find_licence("BSD").release and DataPolicy.load(path).licences.find_licence("BSD").release
    )


def test_the_example_of_the_documentation_is_a_valid_policy(tmp_path: Path) -> None:
    (example,) = re.findall(r"```\n(fields:\n.*?)```", (ROOT / "docs" / "DATA.md").read_text(), re.DOTALL)
    (tmp_path / "data.yaml").write_text(example)
    first, second, third, last = DataPolicy.load(tmp_path / "data.yaml").fields
    row = {"title": "T", "body": "B", "meta": {"shop": "S"}, "q": "Why?", "why": "Hm.", "a": "So."}
    found = parse_document(row, "text", first)
    assert (found.content, found.source, found.domain) == ({"text": "T\n\nB"}, "S", "reviews")
    words = [turn["content"] for turn in parse_document(row, "text", second).content["messages"]]
    assert words == ["Be short.", "Why?", "<think>\nHm.\n</think>\n\nSo."]
    assert third.ignore == ["tools", "tool_calls", "tool_call_id"]
    assert parse_document({"text": "a"}, "text", last).license == "MIT"
