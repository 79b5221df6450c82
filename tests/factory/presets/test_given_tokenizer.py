"""A tokenizer that a person gives is used with its own ids, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import tokenizers as library

from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.ingest.chain import ingest_shard
from factory.ingest.tokenizer import SPLIT_PATTERN, Tokenizer, train_tokenizer
from factory.ledger.ledger import Ledger, tokenizers
from factory.ledger.plant import Plant
from factory.presets.new_workspace import install_tokenizer, open_tokenizer
from tests.support.factory.made_up_text import prose
from tests.support.messages import refused

GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
CODE = "def f(x):\n    return x[0] + 12 * 345  # it's\n\n"
Change = Callable[[dict[str, Any]], None]


def whole_bytes(**change: Any) -> dict[str, Any]:
    split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return split | change


def setting(**keys: Any) -> Change:
    return lambda raw: raw.update(keys)


def added(raw: dict[str, Any]) -> None:
    like = raw["added_tokens"][0]
    raw["added_tokens"].append(like | {"id": 512, "content": "<file>", "special": False})


def renumbered(raw: dict[str, Any]) -> None:
    names = {token: number for number, token in enumerate(reversed(raw["model"]["vocab"]))}
    raw["model"]["vocab"] = names
    raw["added_tokens"] = [token | {"id": names[token["content"]]} for token in raw["added_tokens"]]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    texts = [f"{prose(i)}\n{CODE * 3}" for i in range(60)]
    return train_tokenizer(iter(texts), 512, tmp_path_factory.mktemp("ours"))


def changed(ours: Tokenizer, folder: Path, change: Change) -> Path:
    raw = json.loads((ours.folder / "tokenizer.json").read_text())
    change(raw)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize(
    "change",
    [
        setting(pre_tokenizer=GPT2),
        setting(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2]}),
        setting(pre_tokenizer=GPT2 | {"add_prefix_space": True}),
        setting(normalizer={"type": "Lowercase"}),
        setting(normalizer={"type": "NFC"}),
        added,
        renumbered,
    ],
    ids=["GPT-2", "digits", "a blank before", "lower case", "NFC", "an added word", "other ids"],
)  # fmt: skip
def test_a_tokenizer_of_another_kind_is_used_with_its_own_ids(ours: Tokenizer, tmp_path: Path, change: Change) -> None:
    path = changed(ours, tmp_path, change)
    own = library.Tokenizer.from_file(str(path))
    texts = [f"{prose(1000 + i, 30)}\n\n{CODE}  {i * 7919} naïve ☃ it's <file> cafe\u0301" for i in range(40)]
    with open_tokenizer(path) as tokenizer:
        assert not tokenizer.is_own
        assert [tokenizer.encode(text) for text in texts] == [
            own.encode(text, add_special_tokens=False).ids for text in texts
        ]
        assert tokenizer.end_token == own.token_to_id("<|endoftext|>")


def test_a_broken_tokenizer_is_refused_in_one_line(ours: Tokenizer, tmp_path: Path) -> None:
    path = changed(ours, tmp_path, setting(model={"type": "BPE"}))
    with refused("presets.bad_tokenizer", InputError) as raised, open_tokenizer(path):
        pass
    line = str(raised.value)
    assert str(path) in line and "\n" not in line and "/tmp/tmp" not in line


def test_an_accepted_tokenizer_gives_its_own_ids_for_400_texts(ours: Tokenizer, tmp_path: Path) -> None:
    """A pattern that splits otherwise only where the vocabulary joins nothing gives the same ids, and is accepted."""
    texts = [f"{prose(1000 + i, 30)}\n\n{CODE}  {i * 7919} naïve ☃ it's" for i in range(400)]
    three = r"\p{N}{1,3}"
    split = {
        "type": "Split",
        "pattern": {"Regex": SPLIT_PATTERN.replace(r"|\p{N}|", f"|{three}|")},
        "behavior": "Isolated",
        "invert": False,
    }
    same = changed(ours, tmp_path, setting(pre_tokenizer={"type": "Sequence", "pretokenizers": [split, whole_bytes()]}))
    own = library.Tokenizer.from_file(str(same))
    with open_tokenizer(same) as tokenizer:
        assert [tokenizer.encode(text) for text in texts] == [
            own.encode(text, add_special_tokens=False).ids for text in texts
        ]


@pytest.mark.parametrize("bos", [True, False])
def test_a_given_tokenizer_is_installed_before_the_first_shard_and_makes_the_shards_ids(
    ours: Tokenizer, plant: Workspace, tmp_path: Path, bos: bool
) -> None:
    path = changed(ours, tmp_path, (lambda raw: None) if bos else setting(post_processor=None))
    ledger = Ledger.open(plant.ledger_url)
    with open_tokenizer(path) as given:
        install_tokenizer(Plant(plant, ledger), given)
        install_tokenizer(Plant(plant, ledger), given)  # again: the same
        sha256 = given.sha256
    (row,) = ledger.select_rows(sa.select(tokenizers))
    assert (row["sha256"], row["vocab_size"]) == (sha256, 512)
    frozen = Tokenizer.load(plant.tokenizer)
    assert frozen.bos == ((0,) if bos else ())
    template = json.loads((plant.tokenizer / "tokenizer_config.json").read_text())["chat_template"]
    assert template == (plant.tokenizer / "chat_template.jinja").read_text() == frozen.chat_template
    lines = [json.dumps({"id": str(i), "text": prose(2000 + i), "domain": "docs", "license": "MIT"}) for i in range(40)]
    shard = plant.inbox / "shard.jsonl"
    shard.write_text("\n".join(lines) + "\n")
    assert ingest_shard(Plant(plant, ledger), shard, workers=0).state == "ingested"
    assert len(ledger.select_rows(sa.select(tokenizers))) == 1 and Tokenizer.load(plant.tokenizer).sha256 == sha256
    made = ledger.select_rows(sa.text("SELECT tokenizer FROM token_shards"))
    assert {entry["tokenizer"] for entry in made} == {sha256}
