"""The chat templates of a folder are those that transformers chooses, or files that contradict each other are named."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from factory.core.errors import InputError
from factory.ingest.installing import prepare_tokenizer
from factory.ingest.tokenizing.description import read_chat_templates
from tests.support.factory.made_up_text import prose
from tests.support.messages import refused
from tests.support.tokenizers.families import CHATML, FAMILIES

A, B = CHATML, CHATML.replace("careful", "careless")
T, U = CHATML.replace("helper", "caller"), CHATML.replace("helper", "other caller")
MAIN = (None, A)
CONFIG: tuple[Any, ...] = (
    None,
    A,
    [{"name": "default", "template": A}, {"name": "tool_use", "template": T}],
    [{"name": "tool_use", "template": T}],
)
MORE: tuple[dict[str, str], ...] = ({}, {"rag": B, "tool_use": T}, {"tool_use": U}, {"default": A})
LEGACY = (None, A, B)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = FAMILIES["smollm2"].write(tmp_path_factory.mktemp("bare") / "model", [prose(i) for i in range(40)])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write(bare: Path, folder: Path, main: str | None, config: Any, more: dict[str, str], legacy: str | None) -> Path:
    shutil.copytree(bare, folder)
    if main is not None:
        (folder / "chat_template.jinja").write_text(main)
    if config is not None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": config}))
    if more:
        (folder / "additional_chat_templates").mkdir()
    for name, text in more.items():
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    if legacy is not None:
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": legacy}))
    return folder


def named(config: Any) -> dict[str, str]:
    if config is None:
        return {}
    return {"default": config} if isinstance(config, str) else {one["name"]: one["template"] for one in config}


@pytest.mark.slow("transformers reads 96 folders")
def test_templates_are_those_of_transformers_unless_two_of_one_name_differ(bare: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    counts = {"same": 0, "ingest.two_templates": 0, "ingest.legacy_template": 0, "ingest.no_default_template": 0}
    for number, (main, config, more, legacy) in enumerate(itertools.product(MAIN, CONFIG, MORE, LEGACY)):
        folder = write(bare, tmp_path / str(number), main, config, more, legacy)
        texts: dict[str, set[str]] = {}
        sources = ({"default": main} if main else {}, more, named(config), {"default": legacy} if legacy else {})
        for name, text in itertools.chain.from_iterable(source.items() for source in sources):
            texts.setdefault(name, set()).add(text)
        contradicts = any(len(found) > 1 for found in texts.values())
        try:
            found = read_chat_templates(folder, json.loads((folder / "tokenizer_config.json").read_text()))
        except InputError as error:
            counts[error.code] += 1
            assert (error.code == "ingest.two_templates") == contradicts, (main, config, more, legacy)
            continue
        assert not contradicts
        theirs = AutoTokenizer.from_pretrained(folder).chat_template
        assert found == (theirs if isinstance(theirs, dict) else {"default": theirs} if theirs else {})
        if more and "default" in found:
            prepared = tmp_path / f"{number} prepared"
            prepared.mkdir()
            prepare_tokenizer(folder, prepared)
            again = AutoTokenizer.from_pretrained(prepared).chat_template
            assert found == (again if isinstance(again, dict) else {"default": again})
            assert not [path for path in prepared.iterdir() if path.is_dir()], "an export has no folders"
        counts["same"] += 1
    sizes = {"same": 42, "ingest.two_templates": 35, "ingest.legacy_template": 13, "ingest.no_default_template": 6}
    assert counts == sizes


def test_both_places_of_different_templates_are_named(bare: Path, tmp_path: Path) -> None:
    folder = write(bare, tmp_path / "model", A, None, {"default": B}, None)
    places = {"first": "chat_template.jinja", "second": "additional_chat_templates/default.jinja"}
    with refused("ingest.two_templates", InputError, folder=folder, name="default", **places):
        prepare_tokenizer(folder, tmp_path)
    folder = write(bare, tmp_path / "other", A, None, {}, B)
    with refused("ingest.two_templates", InputError, second="chat_template.json"):
        prepare_tokenizer(folder, tmp_path)
