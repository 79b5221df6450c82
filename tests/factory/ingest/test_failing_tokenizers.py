"""A tokenizer that panics, hangs or takes all memory on some text is refused, or costs the documents with such a text and nothing else."""

from __future__ import annotations

import functools
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from factory.core.errors import FactoryError, InputError
from factory.core.workspace import Workspace
from factory.ingest import chain
from factory.ingest.chain import ShardReport, ingest_shard
from factory.ingest.forked_calls import ForkedCalls, ItemKilledProcessError
from factory.ingest.installing import install_model_tokenizer
from factory.ingest.tokenizer import Tokenizer
from factory.ingest.tokenizing.library_faults import TokenizerFailedError
from factory.ingest.worker import SECONDS_A_MB, IngestJob
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.presets import new_workspace
from factory.presets.new_workspace import open_tokenizer
from tests.support.factory.made_up_text import prose
from tests.support.messages import refused
from tests.support.tokenizers.families import FAMILIES

GEEZ, OTHER = (
    "[\u1200-\u137f \\n.]",
    "[^\u1200-\u137f \\n.]",
)  # the letters of a script that the trial has only in short texts
PANICS = f"(?:{GEEZ}|{GEEZ}{{2}})+{OTHER}"  # tries all ways of splitting a text, until Oniguruma gives up
HANGS = f"{GEEZ}+{OTHER}"  # tries each beginning of a text, to its end


def geez(number: int, words: int) -> str:
    draw = random.Random(number)
    word = lambda: "".join(chr(draw.randrange(0x1200, 0x1240)) for _ in range(draw.randint(2, 8)))
    return "\n".join(" ".join(word() for _ in range(12)) + "." for _ in range(words // 12))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["llama3"].write(tmp_path_factory.mktemp("sound") / "model", [prose(i) for i in range(60)])


def with_split(sound: Path, folder: Path, pattern: str) -> Path:
    """A copy of a tokenizer, with one more step that splits a text before the others."""
    folder.mkdir()
    for path in sound.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    library = json.loads((folder / "tokenizer.json").read_text())
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    library["pre_tokenizer"]["pretokenizers"].insert(0, step)
    (folder / "tokenizer.json").write_text(json.dumps(library))
    return folder


def text_row(name: str, text: str) -> dict[str, Any]:
    return {"id": name, "text": text, "license": "MIT"}


Ingest = Callable[..., ShardReport]


@pytest.fixture
def ingest(
    sound: Path, workspace: Workspace, ledger: Ledger, write_shard: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Ingest:
    """As the daemon ingests a small file: with a worker process only where the tokenizer is of another maker."""

    def run(pattern: str, rows: list[dict[str, Any]], seconds: float = 20.0, workers: int | None = None) -> ShardReport:
        monkeypatch.setattr(chain, "IngestJob", functools.partial(IngestJob, document_seconds=seconds))
        plant = Plant(workspace, ledger)
        if not (workspace.tokenizer / "tokenizer.json").exists():
            install_model_tokenizer(with_split(sound, tmp_path / "failing", pattern), plant)
        return ingest_shard(plant, write_shard(rows, f"{len(list(workspace.inbox.iterdir()))}.jsonl"), workers=workers)

    return run


def fates(ledger: Ledger) -> dict[str, tuple[str, str | None]]:
    return {row["id"]: (row["fate"], row["rule"]) for row in ledger.read("SELECT id, fate, rule FROM documents")}


@pytest.mark.parametrize("workers", [None, 0, 2])
def test_a_document_at_which_the_library_panics_is_dropped_and_counted(
    workers: int | None, ingest: Ingest, ledger: Ledger
) -> None:
    good = [text_row(f"good{i}", prose(i)) for i in range(30)]
    bad = [text_row(f"bad{i}", geez(i, 60)) for i in range(3)]
    report = ingest(PANICS, [*good[:15], *bad, *good[15:]], workers=workers)
    assert (report.state, report.counts["dropped"]) == ("ingested", {"tokenizer_failed": 3})
    assert {name for name, (_, rule) in fates(ledger).items() if rule == "tokenizer_failed"} == {"bad0", "bad1", "bad2"}
    assert report.counts["train"] + report.counts["held_out"] == 30
    (row,) = ledger.read("SELECT detail FROM documents WHERE id = 'bad1'")
    assert "retry-limit-in-match" in row["detail"]
    again = ingest(PANICS, [text_row(f"more{i}", prose(100 + i)) for i in range(10)], workers=workers)
    assert again.state == "ingested" and again.counts["dropped"] == {}


@pytest.mark.slow("a tokenizer hangs until its limit of processor time")
def test_a_document_that_takes_too_much_processor_time_is_dropped(ingest: Ingest, ledger: Ledger) -> None:
    """It does not panic, and no signal handler of Python could interrupt it."""
    rows = [text_row(f"good{i}", prose(i)) for i in range(30)]
    rows[10:10] = [text_row("slow", geez(1, 8000)), text_row("short", geez(2, 100))]
    report = ingest(HANGS, rows, 2.0)
    assert (report.state, report.counts["dropped"]) == ("ingested", {"tokenizer_failed": 1})
    assert fates(ledger)["slow"] == ("dropped", "tokenizer_failed") and fates(ledger)["short"][0] != "dropped"
    (row,) = ledger.read("SELECT detail FROM documents WHERE id = 'slow'")
    assert "processor time" in row["detail"]


@pytest.mark.slow("a tokenizer hangs until its limit of processor time")
def test_a_tokenizer_that_fails_for_most_documents_stops_the_ingest_and_not_the_daemon(
    ingest: Ingest, ledger: Ledger
) -> None:
    rows = [text_row(f"slow{i}", geez(i, 3000)) for i in range(24)]
    shortest = min(len(row["text"]) for row in rows)
    with refused("ingest.tokenizer_keeps_failing", FactoryError, most=20):
        ingest(HANGS, rows, 0.2 - SECONDS_A_MB * shortest / 1e6)
    assert fates(ledger) == {} and not ledger.read("SELECT id FROM token_shards")
    assert ingest(HANGS, [text_row(f"good{i}", prose(i)) for i in range(20)]).state == "ingested"


def test_memory_that_a_text_takes_ends_the_text_alone(sound: Path, tmp_path: Path) -> None:
    folder = with_split(sound, tmp_path / "failing", "x")
    library = json.loads((folder / "tokenizer.json").read_text())
    longer = {"type": "Replace", "pattern": {"String": "\u1234"}, "content": "\u1234" * 10}
    library["normalizer"] = {"type": "Sequence", "normalizers": [longer] * 9}
    (folder / "tokenizer.json").write_text(json.dumps(library))
    tokenizer = Tokenizer.load(folder)
    calls = ForkedCalls(tokenizer.encode, 1 << 28)
    assert calls.call("plain", 20.0) == tokenizer.encode("plain")
    with pytest.raises(ItemKilledProcessError) as died:
        calls.call("\u1234", 60.0)
    assert died.value.number == signal.SIGABRT and not died.value.took_too_long
    assert calls.call("again", 20.0) == tokenizer.encode("again")
    calls.close()


def test_a_panic_is_an_error_of_the_factory_wherever_a_tokenizer_is_used(sound: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(with_split(sound, tmp_path / "failing", PANICS))
    chat = [{"role": "user", "content": geez(1, 60)}, {"role": "assistant", "content": "a"}]
    for use in (
        lambda: tokenizer.encode(geez(1, 60)),
        lambda: tokenizer.encode_text_prompt(geez(1, 60)),
        lambda: tokenizer.encode_messages(chat),
        lambda: tokenizer.encode_chat_prompt(chat[:1]),
    ):
        with refused("ingest.tokenizer_failed", TokenizerFailedError):
            use()
    assert tokenizer.encode("still used") == Tokenizer.load(sound).encode("still used")


@pytest.mark.parametrize(
    "pattern",
    [
        "(?:a|aa)+!$",
        "(?: |  )+b",
        "(?:\u0301|\u0301\u0301)+x",
        "(?:[\U00010000-\U0010ffff]|[\U00010000-\U0010ffff]{2})+[^\U00010000-\U0010ffff]",
    ],
)
def test_a_tokenizer_that_panics_on_odd_texts_is_refused(pattern: str, sound: Path, tmp_path: Path) -> None:
    """The small trial of old had no long runs, and passed each of these."""
    folder = with_split(sound, tmp_path / "failing", pattern)
    with refused("presets.crashing_tokenizer", InputError), open_tokenizer(folder):
        pass


@pytest.mark.slow("a tokenizer hangs until its limit of processor time")
def test_a_tokenizer_that_hangs_on_a_long_line_is_refused(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_workspace, "TRY_SECONDS", 20.0)
    folder = with_split(sound, tmp_path / "failing", "a+[bcd]")
    with refused("presets.crashing_tokenizer", InputError), open_tokenizer(folder):
        pass


@pytest.mark.parametrize("change", ["unknown", "not a pair"])
def test_merges_that_the_vocabulary_lacks_are_refused(change: str, sound: Path, tmp_path: Path) -> None:
    folder = with_split(sound, tmp_path / "failing", "x")
    library = json.loads((folder / "tokenizer.json").read_text())
    library["model"]["merges"].insert(3, ["no such", "tokens"] if change == "unknown" else ["one"])
    (folder / "tokenizer.json").write_text(json.dumps(library))
    with refused("presets.bad_tokenizer", InputError), open_tokenizer(folder):
        pass


@pytest.mark.slow("eight tokenizers are trained and tried")
@pytest.mark.parametrize("name", FAMILIES)
def test_tokenizers_of_public_families_pass_the_trial(name: str, tmp_path: Path) -> None:
    folder = FAMILIES[name].write(tmp_path / name, [prose(i) for i in range(60)])
    command = [sys.executable, "-I", str(new_workspace.TRY_TOKENIZER), str(folder / "tokenizer.json")]
    assert subprocess.run(command, capture_output=True).returncode == 0
