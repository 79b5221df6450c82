"""The tokenizer of a model's folder becomes the workspace's, as it is, or is refused with what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from factory.core.errors import ConfigError, InputError
from factory.core.workspace import Workspace
from factory.evals.export_parity import ForeignTokenFiles, check_export_files
from factory.ingest.chain import ingest_shard
from factory.ingest.installing import AddedRow, install_model_tokenizer, list_missing_tokens
from factory.ingest.tokenizer import FILES, Tokenizer
from factory.ledger.ledger import Ledger, tokenizers
from factory.ledger.plant import Plant
from factory.repairs.token_shards import find_tokenizer_damage
from tests.support.factory.made_up_text import prose
from tests.support.messages import refused
from tests.support.text.library import library
from tests.support.tokenizers.families import FAMILIES
from trainer.contract.checkpoint.export import make_generation_config, make_hf_config
from trainer.contract.data.token_shard import TokenShard
from trainer.contract.recipe import Recipe

Change = Callable[[Path], object]


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    texts = [library()["json"].text, *(prose(number) for number in range(40))]
    return {name: FAMILIES[name].write(root / name, texts) for name in ("llama3", "smollm2", "mistral")}


def json_file(name: str, **keys: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        content |= keys
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))

    return change


def documents(count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"id": f"t{i}", "text": prose(i), "domain": "docs", "license": "MIT"} for i in range(count)
    ]
    chats = [
        [{"role": "user", "content": prose(900 + i, 3)}, {"role": "assistant", "content": prose(950 + i, 12)}]
        for i in range(count)
    ]
    return rows + [{"id": f"c{i}", "messages": chat, "license": "MIT"} for i, chat in enumerate(chats)]


@pytest.mark.parametrize("name", ["llama3", "smollm2", "mistral"])
def test_an_installed_tokenizer_makes_the_shards_and_the_export_has_its_files(
    sources: dict[str, Path], workspace: Workspace, ledger: Ledger, write_shard: Any, tmp_path: Path, name: str
) -> None:
    plant, source = Plant(workspace, ledger), sources[name]
    installed = install_model_tokenizer(source, plant)
    again = install_model_tokenizer(source, plant)
    assert installed.added_rows == () and again.tokenizer.sha256 == installed.tokenizer.sha256
    (row,) = ledger.select_rows(sa.select(tokenizers))
    assert (row["sha256"], row["vocab_size"]) == (installed.tokenizer.sha256, installed.tokenizer.vocab_size)
    for file in FILES:
        assert (source / file).exists() == (workspace.tokenizer / file).exists()
        if (source / file).exists():
            assert (workspace.tokenizer / file).read_bytes() == (source / file).read_bytes()
    report = ingest_shard(plant, write_shard(documents(40)), workers=0)
    assert report.state == "ingested" and not find_tokenizer_damage(plant)
    (shard,) = [TokenShard(Path(one["path"])) for one in ledger.read("SELECT path FROM token_shards")]
    assert shard.manifest["tokenizer_sha256"] == installed.tokenizer.sha256
    kinds = set()
    texts = {row["id"]: row for row in documents(40)}
    for one in shard.documents.to_pylist():
        start, stop = one["start"], one["start"] + one["length"]
        ids, mask = shard.tokens[start:stop], shard.read_loss_mask(start, stop)
        content = texts[one["id"]]
        key = "messages" if "messages" in content else "text"
        assert installed.tokenizer.decode_document(ids, mask)[key] == content[key]
        kinds.add(key)
    assert kinds == {"messages", "text"}

    export = tmp_path / "export"
    export.mkdir()
    recipe = Recipe.load(workspace.recipe_path())
    (export / "config.json").write_text(json.dumps(make_hf_config(recipe.model, "float32")))
    (export / "generation_config.json").write_text(json.dumps(make_generation_config()))
    tokenizer = Tokenizer.load(workspace.tokenizer)
    tokenizer.copy_to(export)
    assert Tokenizer.load(export).sha256 == tokenizer.sha256
    config, generation = (json.loads((export / file).read_text()) for file in ("config.json", "generation_config.json"))
    assert generation["eos_token_id"] == [*tokenizer.stop_ids] and generation["do_sample"] is False
    assert config["bos_token_id"] == tokenizer.bos_token and config["pad_token_id"] == tokenizer.ids.pad
    files = ForeignTokenFiles(tokenizer)
    check = lambda: {one.name: one.ok for one in check_export_files(export, None, tokenizer.named_ids, [], None, files)}
    assert check() == {"bos_eos": True, "generation_config": True, "template": True}
    json_file("generation_config.json", eos_token_id=[0])(export)
    assert check()["bos_eos"] is False
    tokenizer.copy_to(export)
    json_file("tokenizer_config.json", chat_template="{{ messages }}")(export)
    (export / "chat_template.jinja").write_text("{{ messages }}")
    assert check() == {"bos_eos": False, "generation_config": True, "template": False}


def test_a_tokenizer_that_lies_in_the_workspace_is_kept_and_frozen(
    sources: dict[str, Path], workspace: Workspace, ledger: Ledger, write_shard: Any
) -> None:
    plant = Plant(workspace, ledger)
    shutil.copytree(sources["llama3"], workspace.tokenizer, dirs_exist_ok=True)
    ids = Tokenizer.load(workspace.tokenizer).encode(prose(1))
    assert ingest_shard(plant, write_shard(documents(30)), workers=0).state == "ingested"
    frozen = Tokenizer.load(workspace.tokenizer)
    (row,) = ledger.select_rows(sa.select(tokenizers))
    assert frozen.encode(prose(1)) == ids and row["sha256"] == frozen.sha256 and not frozen.is_own
    before = (workspace.tokenizer / "chat_template.jinja").read_text()
    (workspace.tokenizer / "chat_template.jinja").write_text(before + " ")
    assert find_tokenizer_damage(plant), "the template decides ids too"
    with refused("ingest.frozen_tokenizer", InputError, source=sources["mistral"]):
        install_model_tokenizer(sources["mistral"], plant)


def test_a_tokenizer_with_more_ids_than_the_embedding_is_refused_before_a_document_is_tokenised(
    sources: dict[str, Path], workspace: Workspace, ledger: Ledger, write_shard: Any
) -> None:
    shutil.copytree(sources["llama3"], workspace.tokenizer, dirs_exist_ok=True)
    own = workspace.own_recipe_path()
    own.parent.mkdir(parents=True, exist_ok=True)
    text = workspace.recipe_path().read_text()
    size = Recipe.load(workspace.recipe_path()).model.vocab_size
    own.write_text(text.replace(f"vocab_size: {size}", "vocab_size: 512"))
    with refused("ingest.embedding_too_small", ConfigError, size=512):
        ingest_shard(Plant(workspace, ledger), write_shard(documents(30)), workers=0)
    assert not ledger.select_rows(sa.select(tokenizers)) and not ledger.read("SELECT id FROM token_shards")


def test_a_chat_that_the_template_refuses_is_dropped_with_the_templates_reason(
    sources: dict[str, Path], workspace: Workspace, ledger: Ledger, write_shard: Any
) -> None:
    plant = Plant(workspace, ledger)
    install_model_tokenizer(sources["mistral"], plant)
    answer = {"role": "assistant", "content": prose(7, 12)}
    bad = [{"id": "bad", "messages": [{"role": "user", "content": "a question"}, answer, answer], "license": "MIT"}]
    assert ingest_shard(plant, write_shard([*documents(30), *bad]), workers=0).state == "ingested"
    (row,) = ledger.read("SELECT fate, rule, detail FROM documents WHERE id = 'bad'")
    assert (row["fate"], row["rule"]) == ("dropped", "chat_template") and "roles must alternate" in row["detail"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "ingest.tokenizer_file_missing"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "ingest.not_a_tokenizer"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{"), "ingest.bad_tokenizer_file"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "ingest.tokenizer_file_type"),
        (lambda folder: (folder / "generation_config.json").write_text("nope"), "ingest.bad_tokenizer_file"),
        (json_file("generation_config.json", eos_token_id=[99_999]), "ingest.stop_id_unknown"),
        (json_file("tokenizer_config.json", chat_template="{{ messages }}"), "ingest.two_templates"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{% for"), "ingest.bad_template"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}"), "ingest.template_renders_nothing"),
        (lambda folder: (folder / "chat_template.jinja").write_text("<|im_start|>{{ messages[0].content }}"), "ingest.template_tokens_missing"),
    ],
)  # fmt: skip
def test_a_folder_whose_tokenizer_cannot_be_used_is_refused_and_the_workspace_stays_as_it_was(
    sources: dict[str, Path], workspace: Workspace, ledger: Ledger, tmp_path: Path, change: Change, code: str
) -> None:
    source = Path(shutil.copytree(sources["llama3"], tmp_path / "source"))
    change(source)
    with refused(code, InputError) as raised:
        install_model_tokenizer(source, Plant(workspace, ledger))
    assert str(source) in str(raised.value) or code in ("ingest.bad_template", "ingest.template_renders_nothing")
    assert not (workspace.tokenizer / "tokenizer.json").exists() and not ledger.select_rows(sa.select(tokenizers))


def test_two_equal_templates_are_one_template(sources: dict[str, Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(sources["llama3"], tmp_path / "source"))
    json_file("tokenizer_config.json", chat_template=(source / "chat_template.jinja").read_text())(source)
    assert Tokenizer.load(source).chat_template == Tokenizer.load(sources["llama3"]).chat_template


def test_a_tokenizer_without_an_end_token_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(sources["llama3"], tmp_path / "source"))
    (source / "chat_template.jinja").unlink()
    (source / "generation_config.json").unlink()
    json_file("tokenizer_config.json", eos_token=...)(source)
    library = json.loads((source / "tokenizer.json").read_text())
    for token in library["added_tokens"]:
        token["content"] = token["content"].replace("end_of_text", "nothing")
    (source / "tokenizer.json").write_text(json.dumps(library))
    with refused("ingest.no_end_token", InputError):
        Tokenizer.load(source)


def test_tokens_that_the_template_needs_are_listed_and_added_on_request(
    sources: dict[str, Path], workspace: Workspace, ledger: Ledger, tmp_path: Path
) -> None:
    """As a base model's tokenizer with the chat template of another family."""
    source = Path(shutil.copytree(sources["llama3"], tmp_path / "source"))
    shutil.copyfile(sources["smollm2"] / "tokenizer_config.json", tmp_path / "named")
    template = json.loads((tmp_path / "named").read_text())["chat_template"]
    (source / "chat_template.jinja").write_text(template)
    size = Tokenizer.load(sources["llama3"]).vocab_size
    rows = (AddedRow("<|im_start|>", size), AddedRow("<|im_end|>", size + 1))
    assert list_missing_tokens(source) == rows
    installed = install_model_tokenizer(source, Plant(workspace, ledger), size, add_missing_tokens=True)
    assert installed.added_rows == rows and installed.tokenizer.vocab_size == size + 2
    ids, mask = installed.tokenizer.encode_messages(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    )
    assert ids.tolist().count(size) == 3 and ids[mask][-1] == size + 1 and installed.tokenizer.stop_token == size + 1


def test_ids_beyond_the_embedding_are_refused(sources: dict[str, Path], workspace: Workspace, ledger: Ledger) -> None:
    size = Tokenizer.load(sources["llama3"]).vocab_size
    with refused("ingest.ids_beyond_embedding", InputError, last=size - 1, rows=size - 1):
        install_model_tokenizer(sources["llama3"], Plant(workspace, ledger), size - 1)
    assert install_model_tokenizer(sources["llama3"], Plant(workspace, ledger), size + 64).tokenizer.vocab_size == size
