"""Shards that a model writes: their content, resumption after a kill, openings without held-out documents, and refused requests."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from factory.core.errors import FactoryError, InputError, WorkspaceError
from factory.core.workspace import Workspace
from factory.ingest.document import Content, format_release_as_author, join_texts
from factory.ingest.inbox import ingest_and_move
from factory.ingest.rules.policy import LicenceRules
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger, documents, held_out
from factory.ledger.plant import Plant
from factory.ledger.rows import find_champion
from factory.release.published_link import MODEL_NAME
from factory.synthetic.generating import (
    LOCK,
    AnswerJournal,
    GeneratedShard,
    GenerationRequest,
    generate_shard,
    plan_generation,
)
from factory.synthetic.openings import sample_document_openings
from factory.synthetic.writers import Answer, WriterError
from tests.support.factory.command import Running, command_here
from tests.support.messages import refused
from tests.support.serving.served import add_release, serving

Copy = Callable[..., tuple[Workspace, Ledger]]
SMALL = GenerationRequest(count=9, tokens=12, opening_tokens=10)
PATIENCE = 600.0  # a bug's, not a machine's


def rows_of(path: Path | str) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def content_of(row: dict[str, Any]) -> Content:
    return {key: row[key] for key in ("text", "messages") if key in row}


@pytest.mark.slow("an engine that writes")
def test_each_generated_document_names_its_writer_and_its_opening(copied: Copy) -> None:
    workspace, ledger = copied()
    words = ["--count", "9", "--tokens", "12", "--opening-tokens", "10", "--json"]
    said = json.loads(command_here("generate", *words, home=workspace).stdout)
    release = find_champion(ledger)
    assert release and said["written_by"] == format_release_as_author(1, release.export_sha256)
    rows = rows_of(said["path"])
    assert (
        sum(said["ends"].values()) == 9 and said["ends"].keys() <= {"stop", "length", "empty"} and said["inbox"] == ""
    )
    assert len(rows) == said["documents"] == 9 - said["ends"].get("empty", 0) == len({row["id"] for row in rows})
    tokenizer = Tokenizer.load(workspace.tokenizer)
    planned = plan_generation(Plant(workspace, ledger), SMALL).prompts
    for row in rows:
        assert row["synthetic_by"] == said["written_by"]
        own = ledger.select_first(sa.select(documents).where(documents.c.key == row["opening_of"]))
        assert own and own["fate"] == "train" and own["license"] is None and "license" not in row
        assert (row["domain"], row["source"]) == (own["domain"], own["source"])
        if "messages" in row:
            assert [m["role"] for m in row["messages"]] == ["user", "assistant"] and row["messages"][1]["content"]
        else:
            opening = next(p.content["text"] for p in planned if p.opening_of == row["opening_of"])
            assert row["text"].startswith(opening) and len(row["text"]) > len(opening)
            assert 9 <= len(tokenizer.encode(opening)) <= 11
    assert {"text", "messages"} <= {key for row in rows for key in row}
    # the same again, in another place; another seed, other words
    elsewhere, other = copied("again")
    again = generate_shard(Plant(elsewhere, other), SMALL)
    assert again.sha256 == said["sha256"] and again.path != Path(said["path"])
    reseeded = plan_generation(Plant(elsewhere, other), GenerationRequest(**{**vars(SMALL), "seed": 1}))
    assert {prompt.opening_of for prompt in reseeded.prompts} != {prompt.opening_of for prompt in planned}
    assert not list((elsewhere.root / "generated").glob(".*"))


def test_openings_are_beginnings_of_training_documents(copied: Copy) -> None:
    workspace, ledger = copied()
    raw = {row["id"]: row for path in (workspace.shards / "raw").iterdir() for row in rows_of(path)}
    ids = {row["key"]: row["id"] for row in ledger.select_rows(sa.select(documents.c.key, documents.c.id))}
    found = sample_document_openings(ledger, Tokenizer.load(workspace.tokenizer), 10_000, 24, None, 0, LicenceRules())
    assert len(found) > 300
    for prompt in found:
        whole = raw[ids[prompt.opening_of or ""]]
        if "text" in prompt.content:
            assert whole["text"].startswith(prompt.content["text"]) and len(prompt.content["text"]) > 20
        else:
            assert prompt.content["messages"] == whole["messages"][:1]
    held = [join_texts(row["content"]) for row in ledger.select_rows(sa.select(held_out.c.content))]
    begun = [prompt.content["text"] for prompt in found if "text" in prompt.content]
    assert len(held) > 20 and not [text for text in held for words in begun if text.startswith(words)]


def test_held_out_and_removed_documents_are_never_openings(copied: Copy) -> None:
    workspace, ledger = copied()
    tokenizer = Tokenizer.load(workspace.tokenizer)
    c = documents.c
    fates = {row["fate"] for row in ledger.select_rows(sa.select(c.fate).distinct())}
    assert {"train", "held_out"} <= fates
    keys = [row["key"] for row in ledger.select_rows(sa.select(c.key).where(c.fate == "train").order_by(c.key))]
    spoiled = dict(zip(keys, ("removed", "quarantined", "synthetic", "held_out")))
    with ledger.begin() as tx:
        for (
            key,
            fate,
        ) in spoiled.items():  # as a removal, the loss doctor and an ingest leave them: still in their token shard
            value = {"detail": "synthetic, by release 1"} if fate == "synthetic" else {"fate": fate}
            tx.execute(documents.update().where(c.key == key).values(value))
    found = {
        prompt.opening_of for prompt in sample_document_openings(ledger, tokenizer, 10_000, 5, None, 0, LicenceRules())
    }
    able = {
        row["key"]
        for row in ledger.select_rows(sa.select(c.key, c.tokens).where(c.fate == "train"))
        if row["tokens"] >= 10 and row["key"] not in spoiled
    }
    assert found == able and len(able) > 500
    (held,) = ledger.select_rows(sa.select(sa.func.count().label("n")).where(c.fate == "held_out"))
    assert held["n"] > 20


@pytest.mark.slow("an engine comes up three times")
def test_a_killed_run_continues_and_writes_no_document_twice(copied: Copy) -> None:
    request = GenerationRequest(count=60, tokens=60, opening_tokens=10, temperature=1.0)
    undisturbed = generate_shard(Plant(*copied("undisturbed")), request)
    workspace, ledger = copied()
    words = ["--count", "60", "--tokens", "60", "--opening-tokens", "10", "--temperature", "1"]
    folder = workspace.root / "generated" / f".{request.hash_arguments()}"
    answers = folder / "answers.jsonl"
    run = Running("generate", *words, "-w", str(workspace.root), log=workspace.logs / "said.log")
    deadline = time.monotonic() + PATIENCE
    while not (answers.exists() and answers.read_bytes().count(b"\n") >= 3):
        assert time.monotonic() < deadline and run.poll() is None
    run.kill()
    run.wait()
    assert folder.is_dir() and not list(folder.parent.glob("*.jsonl"))
    whole = answers.read_bytes()
    before = whole.count(b"\n")
    assert 3 <= before < 60, "it was killed before its end"
    first = b"".join(whole.splitlines(keepends=True)[:3])
    answers.write_bytes(first + b'{"number": 59, "text": "torn')  # in the midst of what one request answered
    assert plan_generation(Plant(workspace, ledger), request).is_resumed
    assert "was interrupted" in command_here("generate", *words, "--dry-run", home=workspace).stdout
    done = generate_shard(Plant(workspace, ledger), request)
    assert done.sha256 == undisturbed.sha256 and done.ends == undisturbed.ends
    assert 50 < done.documents == len({row["id"] for row in rows_of(done.path)})
    assert not folder.exists()
    once_more = generate_shard(Plant(workspace, ledger), request)
    assert (once_more.sha256, once_more.ends) == (done.sha256, {})


def test_a_generated_shard_is_ingested_and_adds_no_held_out_documents(copied: Copy) -> None:
    workspace, ledger = copied()
    before = ledger.read("SELECT COUNT(*) AS n FROM held_out")[0]["n"]
    words = ["--count", "40", "--tokens", "40", "--opening-tokens", "10", "--temperature", "0.3", "--inbox"]
    said = command_here("generate", *words, home=workspace).stdout
    (path,) = workspace.inbox.iterdir()
    assert f"inbox: {path}" in said and "(" in said
    written = len(rows_of(path))
    ingest_and_move(Plant(workspace, ledger), path)
    rows = ledger.read("SELECT * FROM documents WHERE detail LIKE 'synthetic, by release 1 (weights %'")
    assert len(rows) == written and not any(row["releasable"] for row in rows)
    assert sum(row["fate"] == "train" for row in rows) > 20
    assert ledger.read("SELECT COUNT(*) AS n FROM held_out")[0]["n"] == before
    assert "has a shard with this content" in command_here("generate", *words, home=workspace).stdout
    assert list(workspace.inbox.iterdir()) == []
    found = json.loads(command_here("provenance", "--document", rows[0]["id"], "--json", home=workspace).stdout)
    assert found[0]["synthetic_by"].startswith("release 1 (weights ")


def test_removals_and_licence_claims_during_a_run_are_respected(copied: Copy) -> None:
    """A removed document, or one claimed under a forbidding licence, is no longer an opening. A stricter licence applies to the text too."""
    workspace, ledger = copied()
    with ledger.begin() as tx:
        tx.execute(documents.update().where(documents.c.fate == "train").values(license="MIT"))
    with pytest.raises(FactoryError, match="cannot be started: Is a directory"):
        generate_without_engine(workspace, ledger, SMALL)
    begun = plan_generation(Plant(workspace, ledger), SMALL)
    assert begun.is_resumed
    first, second, third, removed = [prompt.opening_of for prompt in begun.prompts[:4]]
    (row,) = ledger.read("SELECT shard, domain FROM documents WHERE key = :key", key=first)
    with ledger.begin() as tx:
        tx.execute(documents.update().where(documents.c.key == removed).values(fate="removed"))
        for number, (key, name) in enumerate({first: "proprietary", second: "CC-BY-NC-4.0"}.items()):
            copy = {"key": f"copy:{number}", "id": f"copy {number}", "row": number, "license": name, "matched": key}
            tx.execute(documents.insert().values(**row, **copy, fate="dropped", rule="exact_duplicate"))
    made = generate_shard(Plant(workspace, ledger), SMALL)
    named = {row["opening_of"]: row.get("license") for row in rows_of(made.path)}
    assert made.ends["taken out"] == 2 and made.documents == 7 - made.ends.get("empty", 0) > 0
    assert not {first, removed} & named.keys()
    assert named.get(second, "CC-BY-NC-4.0") == "CC-BY-NC-4.0" and named.get(third, "MIT") == "MIT"


def test_an_interrupted_run_does_not_continue_with_other_weights(copied: Copy) -> None:
    workspace, ledger = copied()
    with pytest.raises(FactoryError, match="cannot be started"):
        generate_without_engine(workspace, ledger, SMALL)
    (run,) = (workspace.root / "generated").glob(".*")
    begun = json.loads((run / "plan.json").read_text())
    begun["writer"] |= {
        "name": format_release_as_author(1, "0" * 64),
        "export_sha256": "0" * 64,
    }  # withdrawn, and its number given again
    (run / "plan.json").write_text(json.dumps(begun))
    with refused("synthetic.broken_run", InputError, folder=run) as caught:
        generate_shard(Plant(workspace, ledger), SMALL)
    assert "release 1 (weights 0000000000000000)" in str(caught.value.data["error"])


def generate_without_engine(workspace: Workspace, ledger: Ledger, request: GenerationRequest) -> GeneratedShard:
    """A run that is interrupted before its first answer: a folder has the name of the engine's log."""
    log = workspace.logs / "generate" / "serve-native-release-1.log"
    log.mkdir(parents=True)
    try:
        return generate_shard(Plant(workspace, ledger), request)
    finally:
        log.rmdir()


def test_a_run_killed_after_its_shard_was_written_is_finished(copied: Copy) -> None:
    workspace, ledger = copied()
    folder = workspace.root / "generated"
    with pytest.raises(FactoryError):
        generate_without_engine(workspace, ledger, SMALL)
    (run,) = folder.glob(".*")
    place = folder / f"{plan_generation(Plant(workspace, ledger), SMALL).name}.jsonl"
    place.write_text('{"text": "whole"}\n')  # the shard was put in place, and then it was killed
    shutil.copytree(run, folder / f"{run.name}.part")  # one that was killed even before its beginning
    assert generate_shard(Plant(workspace, ledger), SMALL).documents == 1 and not run.exists()
    place.unlink()
    run.mkdir()  # it was killed just before this was deleted
    assert not plan_generation(Plant(workspace, ledger), SMALL).is_resumed
    with pytest.raises(FactoryError, match="cannot be started"):
        generate_without_engine(workspace, ledger, SMALL)
    assert plan_generation(Plant(workspace, ledger), SMALL).is_resumed and list(folder.glob(".*")) == [run]
    (run / "plan.json").write_text("{")
    with refused("synthetic.broken_run", InputError, folder=run):
        generate_shard(Plant(workspace, ledger), SMALL)


def test_a_partly_written_answer_is_requested_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    journal = AnswerJournal(path)
    texts = ["one\u2028two", "", "d\u0085e\n"]
    for number, text in enumerate(texts):
        journal.append_answer(number, Answer(text, "stop"))
    journal.close()
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        journal = AnswerJournal(path)
        kept = len(journal)
        assert kept == whole[:cut].count(b"\n") and [journal.read_answer(n).text for n in range(kept)] == texts[:kept]
        for number in range(kept, 3):
            journal.append_answer(number, Answer(texts[number], "stop"))
        journal.close()
        assert path.read_bytes() == whole
    path.write_bytes(whole[:-1] + b"\0\n")  # as a power cut may leave it
    assert len(AnswerJournal(path)) == 2


def test_a_licence_is_never_laxer_than_that_of_the_opening(copied: Copy, tmp_path: Path) -> None:
    workspace, ledger = copied()
    with ledger.begin() as tx:
        tx.execute(documents.update().where(documents.c.domain == "docs").values(license="CC-BY-NC-4.0"))
        tx.execute(documents.update().where(documents.c.domain == "code").values(license="MIT"))
    named = lambda request: {(p.domain, p.license) for p in plan_generation(Plant(workspace, ledger), request).prompts}
    own = {("docs", "CC-BY-NC-4.0"), ("code", "MIT"), ("chat", None)}
    assert named(GenerationRequest(count=60, tokens=9, opening_tokens=10)) == own
    # who names a licence cannot make a stricter one laxer, nor give one to a text that has none
    assert named(GenerationRequest(count=60, tokens=9, opening_tokens=10, licence="Apache-2.0")) == own - {
        ("code", "MIT")
    } | {("code", "Apache-2.0")}
    strict = {("docs", "CC-BY-NC-4.0"), ("code", "CC-BY-NC-4.0"), ("chat", "CC-BY-NC-4.0")}
    assert named(GenerationRequest(count=60, tokens=9, opening_tokens=10, licence="CC-BY-NC-4.0")) == strict
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "One", "license": "MIT"}\n{"prompt": "Two"}\n')
    licences = lambda request: [p.license for p in plan_generation(Plant(workspace, ledger), request).prompts]
    assert licences(GenerationRequest(prompts=path)) == ["MIT", None]
    assert licences(GenerationRequest(prompts=path, licence="CC0-1.0")) == ["CC0-1.0", "CC0-1.0"]
    with refused("synthetic.licence", InputError, licence="proprietary"):
        plan_generation(Plant(workspace, ledger), GenerationRequest(licence="proprietary"))


@pytest.mark.slow("a router and its engine come up, and the judge's model beside them")
def test_an_endpoint_can_write_and_a_refused_prompt_gives_no_document(
    copied: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, ledger = copied()
    path = tmp_path / "prompts.jsonl"
    prompts = [
        {"prompt": "def add(a, b):", "domain": "code", "source": "mine", "license": "MIT"},
        {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is a river?"}]},
        {"prompt": "river stone " * 300},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in prompts))

    async def scene() -> GeneratedShard:
        async with serving(workspace, ledger, key="sesame") as here:
            await here.until(1)
            url = f"{here.client.base_url}/v1"
            request = GenerationRequest(endpoint=url, model=MODEL_NAME, prompts=path, tokens=8, temperature=2.0)
            with refused("synthetic.refused", WriterError) as caught:
                await asyncio.to_thread(generate_shard, Plant(workspace, ledger), request)
            assert caught.value.data["why"].data["status"] == 401
            assert caught.value.data["advice"].data["advice"].code == "synthetic.no_key"
            monkeypatch.setenv("OPENAI_API_KEY", "sesame")
            texts = tmp_path / "texts.jsonl"  # all are asked at once, and what is said of a chat has no advice
            texts.write_text(json.dumps(prompts[0]) + "\n")
            unknown = GenerationRequest(endpoint=url, model="gpt", prompts=texts)
            with refused("synthetic.refused", WriterError) as caught:
                await asyncio.to_thread(generate_shard, Plant(workspace, ledger), unknown)
            why = caught.value.data["why"].data
            assert why["status"] == 404 and "'gpt'" in why["answer"]
            assert caught.value.data["advice"].data["advice"].code == "synthetic.chats_only"
            return await asyncio.to_thread(generate_shard, Plant(workspace, ledger), request)

    made = asyncio.run(scene())
    one, two = rows_of(made.path)
    assert made.ends["refused"] == 1 and made.written_by.startswith(f"{MODEL_NAME} at http://127.0.0.1:")
    assert one["text"].startswith("def add(a, b):") and (one["domain"], one["source"], one["license"]) == (
        "code",
        "mine",
        "MIT",
    )
    assert two["messages"][:2] == prompts[1]["messages"] and two["messages"][2]["role"] == "assistant"
    assert two["domain"] == "chat" and "license" not in two and two["source"] == made.path.stem
    assert {one["synthetic_by"], two["synthetic_by"]} == {made.written_by}


# The code of the error; of an error of another package, a part of its text.
REFUSED: dict[str, tuple[list[str], str]] = {
    "the champion as an endpoint": (["--endpoint", "champion"], "synthetic.endpoint_champion"),
    "two writers": (["--endpoint", "http://127.0.0.1:1/v1", "--model", "m", "--release", "1"], "synthetic.two_writers"),
    "no model": (["--endpoint", "http://127.0.0.1:1/v1"], "synthetic.endpoint_without_model"),
    "no endpoint": (["--model", "m"], "synthetic.endpoint_without_model"),
    "no address": (["--endpoint", "ftp://host", "--model", "m"], "expected a base URL"),
    "a password": (["--endpoint", "https://me:pass@host/v1", "--model", "m"], "without a user name or password"),
    "no key": (["--endpoint", "https://host.invalid/v1", "--model", "m"], "OPENAI_API_KEY"),
    "no release": (["--release", "7"], "no release 7. The ledger has: 1"),
    "no file": (["--prompts", "absent.jsonl"], "reading.unreadable_file"),
    "a domain of a file": (["--prompts", "FILE", "--domain", "docs"], "synthetic.domain_of_prompts"),
    "a domain that nobody has": (["--domain", "law", "--tokens", "9"], "synthetic.no_opening"),
    "too long": (["--tokens", "250"], "synthetic.too_many_tokens"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_impossible_request_is_refused_and_leaves_no_files(what: str, copied: Copy, tmp_path: Path) -> None:
    workspace, _ = copied()
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "One"}\n')
    words, says = REFUSED[what]
    for more in ([], ["--dry-run"]):
        done = command_here("generate", *(str(path) if w == "FILE" else w for w in words), *more, home=workspace)
        assert isinstance(done.exception, InputError), done.exception
        assert done.exception.code == says or says in str(done.exception), done.exception
    assert not (workspace.root / "generated").exists()


def test_a_run_without_a_release_is_refused(workspace: Workspace, ledger: Ledger, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("One\n")
    done = command_here("generate", "--prompts", str(path), home=workspace)
    assert isinstance(done.exception, InputError) and done.exception.code == "synthetic.no_release"
    words = ["--endpoint", "http://127.0.0.1:1/v1", "--model", "m", "--prompts", str(path), "--dry-run"]
    shown = command_here("generate", *words, home=workspace).stdout
    assert "m at http://127.0.0.1:1/v1" in shown and "1 document from 1 prompt" in shown


def test_a_release_whose_export_changed_is_refused_as_writer(copied: Copy, saved: Path) -> None:
    workspace, ledger = copied()
    export = workspace.root / "exports" / "other"
    shutil.copytree(saved / "exports" / "1", export)
    add_release(workspace, ledger, export)
    (export / "generation_config.json").write_text("{}")
    with refused("serving.export_changed", InputError):
        generate_shard(Plant(workspace, ledger), SMALL)
    with pytest.raises(FactoryError, match="cannot be started: Is a directory"):  # the other release would write
        generate_without_engine(workspace, ledger, GenerationRequest(**{**vars(SMALL), "release": 1}))


def test_a_second_run_at_the_same_time_is_refused(copied: Copy) -> None:
    workspace, ledger = copied()
    with workspace.hold_lock(LOCK), pytest.raises(WorkspaceError, match=r"holds generate.lock"):
        generate_shard(Plant(workspace, ledger), SMALL)
