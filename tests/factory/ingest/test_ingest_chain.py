"""The ingest of one shard from file to token shard: fates of rows, quarantine, kills and faults of the machine."""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from factory.core.errors import ConfigError, DamagedTokenizerError, FactoryError, InputError
from factory.core.workspace import Workspace, find_checkout_root
from factory.ingest import chain
from factory.ingest.chain import ShardReport, ingest_shard
from factory.ingest.rules.word_hashes import hash_words
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger, documents, metadata, shards, token_shards
from factory.ledger.plant import Plant
from factory.show.pages.provenance import read_document_provenance
from tests.support.factory.hash_index import indexed
from tests.support.factory.made_up_text import MIT, held_out_texts, prose, texts, use_policy, use_small_vocabulary
from tests.support.messages import refused
from tests.support.patience import PATIENCE_S
from trainer.contract.data.token_shard import TokenShard, hash_file

Ingest = Callable[..., ShardReport]


def document(ledger: Ledger, name: str) -> dict[str, Any]:
    (row,) = read_document_provenance(ledger, name)
    return row


def fate(ledger: Ledger, name: str) -> tuple[str, str | None]:
    row = document(ledger, name)
    return row["fate"], row["rule"]


def test_a_shard_becomes_a_token_shard_and_rows(workspace: Workspace, ledger: Ledger, ingest: Ingest) -> None:
    chat = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because it is so."}]}
    report = ingest([*texts(0, 200), {**chat, "id": "chat", **MIT}])
    assert report.state == "ingested" and report.rows == 201
    assert report.counts["train"] + report.counts["held_out"] == 201 and report.counts["held_out"] >= 1
    found = document(ledger, "d7")
    row = ledger.select_first(sa.select(token_shards.c.path).where(token_shards.c.id == found["token_shard"]))
    assert row
    shard = TokenShard(row["path"])
    assert all(hash_file(shard.path / name) == sha256 for name, sha256 in shard.manifest["files"].items())
    columns = shard.documents.to_pydict()
    place = columns["key"].index(found["key"])
    start, length = columns["start"][place], columns["length"][place]
    tokenizer = Tokenizer.load(workspace.tokenizer)
    assert tokenizer.decode(shard.tokens[start : start + length]) == prose(7)
    assert found["tokens"] == length == found["supervised_tokens"]
    chatted = document(ledger, "chat")
    assert 0 < chatted["supervised_tokens"] < chatted["tokens"] and chatted["domain"] == "chat"
    assert report.tokens == shard.manifest["tokens"] == sum(d["tokens"] for d in report.domains.values())
    kept = ledger.select_rows(sa.select(documents.c.key).where(documents.c.fate == "train").order_by(documents.c.row))
    assert columns["key"] == [row["key"] for row in kept]  # in the order of rows, held-out ones not among them


def test_every_rule_of_the_chain_drops_its_row(workspace: Workspace, ledger: Ledger, ingest: Ingest) -> None:
    first = ingest(texts(0, 200), "first.jsonl")
    assert first.counts["dropped"] == {}
    key, secret = held_out_texts(ledger)[0]
    trained = [
        r["id"] for r in ledger.select_rows(sa.select(documents.c.id).where(documents.c.fate == "train").limit(3))
    ]
    words = prose(int(trained[1][1:])).split(" ")
    words[50] = "altogether"
    quoted = " ".join(secret.split()[30:60])
    report = ingest(
        [
            {"id": "exact", "text": prose(int(trained[0][1:])) + "\r\n\r\n", **MIT},
            {"id": "near", "text": " ".join(words), **MIT},
            {"id": "within", "text": prose(900), **MIT},
            {"id": "again", "text": prose(900), **MIT},
            {"id": "leak", "text": secret, **MIT},
            {"id": "mostly", "text": f"{prose(901, 20)} {quoted}", **MIT},
            {"id": "partly", "text": f"{prose(902, 300)}\n{quoted}\n{prose(903, 300)}", **MIT},
            {"id": "answer", "messages": [{"role": "assistant", "content": quoted + " " + prose(904, 200)}], **MIT},
            {"id": "private", "text": prose(905) + " mail me@python.org", **MIT},
            {"id": "forbidden", "text": prose(906), "license": "proprietary"},
            {"id": "unlicensed", "text": prose(907)},
            {"id": "tiny", "text": "tiny", **MIT},
            b'{"id": "cut", "text": "cut o',
            b"\xff\xfe not text",
            b"",
            {"id": "shapeless"},
            {"id": "mute", "messages": [{"role": "user", "content": "hello"}], **MIT},
        ],
        "second.jsonl",
    )
    assert report.state == "ingested"
    assert report.counts["dropped"] == {
        "bad_encoding": 1, "bad_json": 1, "bad_schema": 1, "contaminated": 3, "empty": 1, "exact_duplicate": 2,
        "licence": 1, "near_duplicate": 1, "no_supervised": 1, "too_short": 1,
    }  # fmt: skip
    assert report.counts["trimmed"] == 1 and report.counts["pii_kinds"] == {"email": 1}
    assert fate(ledger, "exact") == ("dropped", "exact_duplicate")
    assert document(ledger, "exact")["matched_document"]["id"] == trained[0]
    assert fate(ledger, "near") == ("dropped", "near_duplicate")
    assert document(ledger, "near")["matched_document"]["id"] == trained[1]
    assert document(ledger, "again")["matched_document"]["id"] == "within"
    for name in ("leak", "mostly", "answer"):
        assert fate(ledger, name) == ("dropped", "contaminated")
        assert document(ledger, name)["matched"] == key
    partly = document(ledger, "partly")
    assert partly["fate"] == "train" and partly["matched"] == key and "cut out" in partly["detail"]
    assert "1 email" in document(ledger, "private")["detail"]
    assert not document(ledger, "unlicensed")["releasable"] and document(ledger, "private")["releasable"]
    # What was kept holds no 13 words of any held-out document.
    tokenizer = Tokenizer.load(workspace.tokenizer)
    from factory.ingest.rules.contamination import hash_ngrams as of

    secrets = {int(gram) for _, text in held_out_texts(ledger) for gram in of(hash_words(text), 13)}
    for path in {row["path"] for row in ledger.select_rows(sa.text("SELECT path FROM token_shards"))}:
        shard = TokenShard(path)
        for start, length in zip(shard.documents["start"].to_pylist(), shard.documents["length"].to_pylist()):
            kept = of(hash_words(tokenizer.decode(shard.tokens[start : start + length])), 13)
            assert not secrets & {int(gram) for gram in kept}


def test_common_phrases_do_not_count_as_contamination(workspace: Workspace, ledger: Ledger, ingest: Ingest) -> None:
    header = prose(5000, 40)
    rows = [{"id": f"d{i}", "text": f"{header}\n{prose(i, 300)}"} for i in range(150)]
    report = ingest(rows)
    assert report.counts["held_out"] > 0 and report.counts["trimmed"] == 0 and report.counts["dropped"] == {}


rows_of_any_kind = st.lists(
    st.one_of(
        st.integers(0, 30).map(lambda i: {"text": prose(i, 60), **MIT}),
        st.integers(0, 5).map(lambda i: {"messages": [{"role": "assistant", "content": prose(i, 30)}]}),
        st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")),
        st.just({"text": "tiny"}),
    ),
    min_size=1,
    max_size=25,
)


@given(rows_of_any_kind)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_row_has_exactly_one_fate(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    workspace = Workspace.create(tmp_path_factory.mktemp("w") / "w")
    use_policy(workspace, "limits: {max_bad_rows: 1}\ntokenizer: {vocab_size: 300}\n")
    ledger = Ledger.create(workspace.ledger_url)
    path = workspace.inbox / "a.jsonl"
    rows = [*({"text": prose(100 + i, 60), **MIT} for i in range(6)), *rows]  # of which something is to train on
    path.write_bytes(
        b"\n".join([b'{"text": "head"}', *(r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows)])
        + b"\n"
    )
    report = ingest_shard(Plant(workspace, ledger), path, workers=0)
    found = ledger.select_rows(sa.select(documents.c.row, documents.c.fate, documents.c.rule))
    assert sorted(row["row"] for row in found) == list(range(len(rows) + 1)) and report.rows == len(rows) + 1
    assert all((row["rule"] is not None) == (row["fate"] == "dropped") for row in found)
    fates = Counter(row["fate"] for row in found)
    assert fates["train"] == report.counts["train"] and fates["dropped"] == sum(report.counts["dropped"].values())


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("empty.jsonl", b"", "empty"),
        ("blank.jsonl", b"\n\n\n", "100% of 3 rows cannot be read (empty 3)"),
        ("noise.jsonl", bytes(range(11, 256)) * 40, "cannot be read"),
        ("utf16.jsonl", '{"text": "x"}'.encode("utf-16"), "UTF-16"),
        ("tool.exe", b"MZ", "files of the type of tool.exe are not supported"),
        ("cut.jsonl.gz", b"\x1f\x8b\x08\x00\x00", "decompression of the file failed"),
    ],
)
def test_an_unusable_file_is_quarantined(
    workspace: Workspace, ledger: Ledger, name: str, data: bytes, reason: str
) -> None:
    path = workspace.inbox / name
    path.write_bytes(data)
    report = ingest_shard(Plant(workspace, ledger), path)
    assert report.state == "quarantined" and reason in (report.reason or "")
    assert [file.read_bytes() for file in workspace.quarantine.iterdir()] == [data]
    assert ledger.select_rows(sa.select(documents)) == [] and not list(workspace.shards.iterdir())
    assert ingest_shard(Plant(workspace, ledger), path) == report


def test_a_shard_of_which_nothing_is_kept_is_ingested_with_its_counts(ledger: Ledger, ingest: Ingest) -> None:
    report = ingest([{"text": "tiny"}, {"text": "small"}])
    assert (report.state, report.counts["dropped"], report.tokens) == ("ingested", {"too_short": 2}, 0)


def test_a_path_that_is_not_a_file_is_refused_and_nothing_is_stored(
    workspace: Workspace, ledger: Ledger, tmp_path: Path
) -> None:
    for path, code in ((tmp_path / "none.jsonl", "ingest.no_file"), (tmp_path, "ingest.folder")):
        with refused(code, InputError, path=path):
            ingest_shard(Plant(workspace, ledger), path)
    assert ledger.select_rows(sa.select(shards)) == []


def test_a_changed_tokenizer_file_or_hash_parameter_is_refused(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    ingest(texts(0, 30), "a.jsonl")
    use_policy(workspace, "decontamination: {ngram: 9}\n")
    with refused("ingest.index_parameters", ConfigError) as caught:
        ingest(texts(50, 30), "b.jsonl")
    assert "n-gram 13" in caught.value.data["old"] and "n-gram 9" in caught.value.data["new"]
    use_small_vocabulary(workspace)
    path = workspace.tokenizer / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    with refused("ingest.damaged_tokenizer", DamagedTokenizerError):
        ingest(texts(50, 30), "b.jsonl")


def test_a_full_disk_stores_nothing(
    workspace: Workspace, ledger: Ledger, write_shard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_vocabulary(workspace)
    path = write_shard(texts(0, 20))
    (workspace.root / "shards").chmod(0o755)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "tokens.bin")

    monkeypatch.setattr(chain, "write_token_shard", full)
    with refused("ingest.stopped", FactoryError, error="No space left on device", where="tokens.bin"):
        ingest_shard(Plant(workspace, ledger), path, workers=0)
    assert ledger.select_rows(sa.select(shards)) == [] and not list(workspace.shards.iterdir())
    monkeypatch.undo()
    assert ingest_shard(Plant(workspace, ledger), path, workers=0).state == "ingested"


def dump(ledger: Ledger) -> dict[str, list[Any]]:
    """Every row that ingest writes, without times, folders and the ledger's own name."""
    own = {"ingested_at", "created_at", "path", "at"}
    tables = (
        "shards",
        "documents",
        "held_out",
        "tokenizers",
        "token_shards",
        "meta",
    )
    rows = {
        name: sorted(
            json.dumps({k: repr(v) for k, v in row.items() if k not in own})
            for row in ledger.select_rows(sa.select(metadata.tables[name]))
            if row.get("key") != "identity"
        )
        for name in tables
    }
    return rows | indexed(ledger)


_RUN = """
import sys
from pathlib import Path
from factory.ingest.chain import ingest_shard
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.core.workspace import Workspace
workspace = Workspace.open(Path(sys.argv[1]))
ingest_shard(Plant(workspace, Ledger.open(workspace.ledger_url)), workspace.inbox / "a.jsonl", workers=2)
"""


def start(workspace: Workspace) -> subprocess.Popen[bytes]:
    """A real ingest with two worker processes, its standard input closed."""
    command = f"exec {sys.executable} -c '{_RUN}' {workspace.root} <&-"
    environment = {**os.environ, "PYTHONPATH": str(find_checkout_root())}
    return subprocess.Popen(["sh", "-c", command], env=environment, cwd=workspace.root)


@pytest.mark.slow("four ingests by three processes each, three of them killed")
def test_after_a_kill_anywhere_the_next_run_ends_with_the_same_rows(tmp_path: Path) -> None:
    data = "".join(json.dumps(row) + "\n" for row in [*texts(0, 500, 200), *texts(0, 5), {"text": "tiny"}])
    spaces = [Workspace.create(tmp_path / name) for name in ("whole", "killed")]
    for space in spaces:
        Ledger.create(space.ledger_url)
        (space.inbox / "a.jsonl").write_text(data)
        use_small_vocabulary(space)
    whole, killed = spaces
    ingest_shard(Plant(whole, Ledger.open(whole.ledger_url)), whole.inbox / "a.jsonl", workers=0)
    signs = ("shards/.ingest-*/*.npy", "tokenizer/tokenizer.json", "shards/[0-9a-f]*")
    for sign in signs:
        process = start(killed)
        while process.poll() is None and not glob.glob(str(killed.root / sign)):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert start(killed).wait(PATIENCE_S) == 0
    one, other = (dump(Ledger.open(space.ledger_url)) for space in spaces)
    assert one == other
    assert len(one["documents"]) == 506 and one["bands"] and one["sampled"] and one["held_out n-grams"]
    assert not list(killed.shards.glob(".ingest-*"))
    assert [path.name for path in killed.shards.glob("[0-9a-f]*")] == [
        path.name for path in whole.shards.glob("[0-9a-f]*")
    ]


def test_the_number_of_workers_does_not_change_the_result(
    workspace: Workspace, ledger: Ledger, ingest: Ingest, tmp_path: Path
) -> None:
    rows = texts(0, 60)
    ingest(rows, "a.jsonl")
    other = Workspace.create(tmp_path / "other")
    other_ledger = Ledger.create(other.ledger_url)
    use_small_vocabulary(other)
    (other.inbox / "a.jsonl").write_bytes((workspace.inbox / "a.jsonl").read_bytes())
    ingest_shard(Plant(other, other_ledger), other.inbox / "a.jsonl", workers=2)
    assert dump(other_ledger) == dump(ledger)
    assert len(dump(ledger)["bands"]) == 60 * 20 and dump(ledger)["held_out n-grams"]
