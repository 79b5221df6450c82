from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from factory.core.errors import ConfigError, InputError
from factory.core.workspace import Workspace
from factory.ingest.chain import ShardReport
from factory.ingest.document import BadRow, parse_document
from factory.ingest.inbox import describe_shard
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.shapes.chats import Notes
from factory.ingest.shapes.mapping import FieldMapping
from factory.ledger.ledger import Ledger, documents, shards
from factory.show.pages.provenance import of_document
from tests.support.factory.made_up_text import prose, use_policy
from tests.support.paths import ROOT

MINE = {"title": "T", "body": {"words": "W"}, "meta": {"lang": "en", "by": "Ann", "n": 3}, "talk": [{"from": "human", "value": "Why?"}],
        "q": "Why?", "a": "So.", "licences": ["MIT", "CC0"], "where": "https://example.org/a", "thread": 12}  # fmt: skip
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So. (en)"},
]


def parsed(**mapping: object) -> dict[str, object]:
    notes = Notes()
    found = parse_document(MINE, "text", FieldMapping.model_validate({"files": "*", **mapping}), notes)
    return {**vars(found), "unread": notes.unread}


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
def test_a_mapping_says_which_column_is_what(mapping: dict[str, object], expected: dict[str, object]) -> None:
    found = parsed(**mapping)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        ({"text": "meta.n"}, "'text' is int, not a string"),
        ({"text": "nobody"}, "the row has no 'nobody', which is its 'text'"),
        ({"text": "{title} {meta}"}, "'meta' stands in a template, and is no text or number but dict"),
        ({"messages": "talk"}, "no assistant message"),
        ({"text": "title", "source": "meta"}, "'source' is not a string of 1000 characters at most (it is dict)"),
    ],
)
def test_a_column_that_cannot_be_that_costs_its_row(mapping: dict[str, object], said: str) -> None:
    with pytest.raises(BadRow) as caught:
        parsed(**mapping)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("[{files: '*', txt: a}]", "unknown key 'fields.0.txt'; did you mean 'text'?"),
        ("[{text: a}]", "key 'fields.0.files' is missing"),
        ("[{files: 'a/*.csv', text: a}]", "files are matched by their name, without the folder"),
        ("[{files: '*', text: a, messages: b}]", "'text' and 'messages' are both mapped: a document is one of them"),
        ("[{files: '*', prompt: a}]", "'prompt' and 'completion' belong together: one of them is missing"),
        ("[{files: '*', text: =a}]", "names no column: every row would have the same"),
        ("[{files: '*', text: '{a'}]", "a brace alone; columns stand in braces, and '{{' is a brace itself"),
        ("[{files: '*', text: ''}]", "it is empty: name a column"),
        ("[{files: '*', text: a, system: b}]", "only a chat has a system turn"),
        ("[{files: '*', ignore: [tool]}]", "fields.0.ignore.0"),
    ],
)
def test_a_mapping_that_says_nothing_is_an_error_of_one_line(tmp_path: Path, fields: str, said: str) -> None:
    (tmp_path / "data.yaml").write_text(f"fields: {fields}\n")
    with pytest.raises(ConfigError, match="data.yaml") as caught:
        DataPolicy.load(tmp_path / "data.yaml")
    assert said in str(caught.value) and "\n" not in str(caught.value)


Ingest = Callable[..., ShardReport]
POLICY = "tokenizer: {vocab_size: 400}\nfields:\n  - {files: 'mine*', text: TEXT, license: =MIT}\n  - {files: '*', source: where}\n"


def said(report: ShardReport) -> str:
    return describe_shard(report.name, report.state, report.rows, report.counts, report.reason)


def test_a_column_that_no_row_has_is_named_with_the_nearest_and_nothing_is_stored(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    rows = [{"title": "T", "body": {"words": prose(n)}, "id": f"m{n}", "where": None} for n in range(30)] + [
        b"not json"
    ]
    use_policy(workspace, POLICY.replace("TEXT", "body.wrods"))
    with pytest.raises(InputError) as caught:
        ingest(rows, "mine-1.jsonl")
    assert str(caught.value) == (
        "mine-1.jsonl: fields.0.text in data.yaml (files: 'mine*') names the column 'body.wrods', which no row has; did you mean 'body.words'?; "
        "nothing was stored"
    )
    assert not ledger.rows(sa.select(shards)) and not ledger.rows(sa.select(documents))
    # the first mapping that matches counts alone, and a column that is always empty is one that there is
    use_policy(workspace, POLICY.replace("TEXT", '"{title}: {body.words}"'))
    report = ingest(rows, "mine-1.jsonl")
    assert report.counts["train"] + report.counts["held_out"] == 30 and report.counts["dropped"] == {"bad_json": 1}
    assert "fields that nothing reads: where" not in said(report)
    (row,) = of_document(ledger, "m7")
    assert row["license"] == "MIT" and row["tokens"] > 100
    assert ingest([{"text": prose(100 + n), "where": "w"} for n in range(20)], "other.jsonl").counts["dropped"] == {}


def test_what_was_read_as_what_is_counted_and_said_once_a_shard(workspace: Workspace, ingest: Ingest) -> None:
    rows = [
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": prose(n)}], "lang": "en"}
        for n in range(12)
    ]
    rows += [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "images": [1]}] * 2
    report = ingest(rows)
    assert report.counts["read_as"] == {"read as ShareGPT: conversations → messages": 12}
    assert report.counts["unread"] == {"lang": 12}
    lines = said(report).split("\n")
    assert lines[1:4] == [
        "    read as ShareGPT: conversations → messages, 12 rows",
        "    fields that nothing reads: lang",
        "    dropped by bad_schema: 2, such as row 12: 'images': the chat template has no place for it; 'ignore: [images]' under 'fields' in "
        "data.yaml drops it and keeps the words",
    ]


def test_a_licence_that_holds_releases_is_said_at_ingest(workspace: Workspace, ledger: Ledger, ingest: Ingest) -> None:
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
    line = (
        "which holds releases back; the line that allows it, under licences.known: 'BSD': {train: true, release: true}"
    )
    assert line in said(report)
    allowed = DataPolicy.load(workspace.policy("data.yaml"))
    path = workspace.root / "policies" / "data.yaml"
    path.write_text(path.read_text().replace("  known:\n", "  known:\n    'BSD': {train: true, release: true}\n"))
    assert not allowed.licences.of("BSD").release and DataPolicy.load(path).licences.of("BSD").release


def test_the_example_of_the_documentation_is_a_policy(tmp_path: Path) -> None:
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
