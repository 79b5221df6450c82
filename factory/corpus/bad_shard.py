"""Makes a deliberately bad shard, to show and test ingest. The shard has bad rows of every kind between good rows. The rows are made from the
workspace's own documents.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from factory.core.errors import InputError
from factory.corpus.shards import LICENSE
from factory.corpus.standard_library import LibraryModule, list_source_files, read_module
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger, documents, held_out, token_shards
from factory.ledger.plant import Plant
from kernels.contract.files import write_atomically
from trainer.contract.data.token_shard import TokenShard

_OF_EACH = 8  # rows of each kind
_SEED = 7
_WORDS_PER_EDIT = 90  # a near copy has one changed word in 90, so about nine in ten shingles stay


def write_bad_shard(path: Path, plant: Plant) -> Path:
    """Write JSONL with these rows in mixed order: new good documents (some with e-mail addresses and a key), copies of
    ingested documents (exact and lightly edited), copies of held-out documents (whole, and quoted inside new documents),
    and rows that are too short, have the wrong shape, are cut off, or are shuffled bytes.

    Raises: InputError if the workspace has no ingested and held-out text yet.
    """
    rng = random.Random(_SEED)
    known = list(_ingested_texts(plant))
    secret = _held_out_texts(plant.ledger)
    if not known or not secret:
        raise InputError(
            "corpus.nothing_ingested",
            "{workspace} has no training documents or no held-out documents. Ingest the corpus first",
            workspace=plant.workspace.root,
        )
    good = list(_inventories(6 * _OF_EACH))
    plain, personal = good[: 2 * _OF_EACH], good[2 * _OF_EACH : 3 * _OF_EACH]
    carriers = good[3 * _OF_EACH : 4 * _OF_EACH]
    rows = [_row(f"good/{i}", text) for i, text in enumerate(plain)]
    rows += [_row(f"personal/{i}", _with_personal_data(text, i)) for i, text in enumerate(personal)]
    rows += [_row(f"copy/{i}", text) for i, text in enumerate(known[:_OF_EACH])]
    rows += [_row(f"near-copy/{i}", _edited(text, rng)) for i, text in enumerate(known[_OF_EACH : 2 * _OF_EACH])]
    rows += [_row(f"held-out-copy/{i}", text) for i, text in enumerate(secret[:_OF_EACH])]
    rows += [
        _row(f"held-out-quote/{i}", f"{carrier}\n\n{_passage(text)}\n\n{more}")
        for i, (carrier, text, more) in enumerate(zip(carriers, secret[_OF_EACH:] or secret, good[4 * _OF_EACH :]))
    ]
    rows += [{"id": f"short/{i}", "text": "See above.", "domain": "docs", "license": LICENSE} for i in range(3)]
    rows += [
        {"id": "shape/0", "title": "no text key"},
        {"id": "shape/1", "messages": [{"role": "user", "content": "Hello?"}]},
    ]
    lines = [json.dumps(row).encode() for row in rows]
    lines += [line[: len(line) // 2] for line in lines[: _OF_EACH // 2]]
    lines += [_shuffled(line, rng) for line in lines[_OF_EACH // 2 : _OF_EACH]]
    rng.shuffle(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, b"\n".join(lines) + b"\n")
    return path


def _row(name: str, text: str) -> dict[str, Any]:
    return {"id": f"bad/{name}", "text": text, "domain": "docs", "license": LICENSE, "source": f"bad/{name}"}


def _ingested_texts(plant: Plant) -> Iterator[str]:
    """Yield the texts of training documents that ingest did not change, decoded from the token shards."""
    d, t = documents.c, token_shards.c
    statement = (
        sa.select(d.key, t.path)
        .join(token_shards, t.id == d.token_shard)
        .where(d.fate == "train", d.domain == "docs", d.detail.is_(None), d.tokens > 250)
        .order_by(d.key)
        .limit(2 * _OF_EACH)
    )
    for found in plant.ledger.select_rows(statement):
        shard = TokenShard(found["path"])
        place = shard.documents["key"].to_pylist().index(found["key"])
        start, length = (shard.documents[name][place].as_py() for name in ("start", "length"))
        yield Tokenizer.load(plant.workspace.tokenizer).decode(shard.tokens[start : start + length])


def _held_out_texts(ledger: Ledger) -> list[str]:
    h = held_out.c
    rows = ledger.select_rows(sa.select(h.content).where(h.domain == "docs").order_by(h.key).limit(2 * _OF_EACH))
    return [row["content"]["text"] for row in rows if "text" in row["content"]]


def _edited(text: str, rng: random.Random) -> str:
    words = text.split(" ")
    for place in range(_WORDS_PER_EDIT // 2, len(words), _WORDS_PER_EDIT):
        words[place] = rng.choice(("altogether", "perhaps", "evidently", "roughly"))
    return " ".join(words) + "\n"


def _passage(text: str) -> str:
    """Forty words from the middle of a text."""
    words = text.split()
    middle = len(words) // 2
    return " ".join(words[max(middle - 20, 0) : middle + 20])


def _with_personal_data(text: str, number: int) -> str:
    key = "AKIA" + "".join(random.Random(number).choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", k=16))
    mail, mirror = f"maintainer{number}@python-docs.net", f"8.8.{number}.8"
    return f"{text}\nQuestions go to {mail}; the mirror at {mirror} wants the key {key}.\n"


def _shuffled(line: bytes, rng: random.Random) -> bytes:
    """Return the bytes in random order, without line ends. Every tenth byte is replaced by a non-ASCII byte."""
    data = bytearray(line.replace(b"\n", b" "))
    rng.shuffle(data)
    for place in range(0, len(data), 10):
        data[place] = rng.randrange(0x80, 0x100)
    return bytes(data)


def _inventories(count: int) -> Iterator[str]:
    """New texts that no other shard has: counts of the names in some modules."""
    written = 0
    for path, source in list_source_files():
        module = read_module(path, source)
        if written < count and module and module.tree and len(module.text) > 4000:
            yield _inventory(module)
            written += 1
        if written == count:
            return


def _inventory(module: LibraryModule) -> str:
    found = Counter(re.findall(r"[^\W\d]\w*", module.text)).most_common(40)
    lines = [f"An inventory of {module.name}", "", f"{module.source} counts {len(module.text.splitlines())} lines."]
    return "\n".join([*lines, *(f"- {name} occurs {count} times in {module.name}" for name, count in found)])
