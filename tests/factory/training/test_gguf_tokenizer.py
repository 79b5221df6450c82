"""The tokenizer of a .gguf file has the tokens of the file: none that transformers adds, and each by its id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers

from factory.core.progress import SILENT
from factory.presets.imported_workspace import ImportOptions, make_imported_workspace
from factory.release.gguf.writing import write_export_gguf
from factory.training.gguf_source import open_gguf
from factory.training.import_source import ImportRefusedError
from tests.support.factory.made_up_text import prose
from tests.support.models.changed_files import rewrite_gguf
from tests.support.tokenizers.families import FAMILIES
from tests.support.trainer.public_model import SIZES

TOKENS, KINDS = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
EOT = "<\uff5ceot\uff5c>"  # in the form of DeepSeek's tokens: not in the alphabet of bytes

pytestmark = pytest.mark.slow("transformers starts in the sandbox to read each file")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Models with a tokenizer in the form of Llama 3, which has no <|endoftext|>, by the spare rows of their embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made: dict[int, Path] = {}
    for spare in (0, 40):
        folder = FAMILIES["llama3"].write(
            tmp_path_factory.mktemp("models") / f"m{spare}", [prose(i) for i in range(60)]
        )
        size = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() + spare
        LlamaForCausalLM(LlamaConfig(vocab_size=size, **SIZES)).save_pretrained(folder)
        made[spare] = folder
    return made


@pytest.fixture(scope="module")
def files(folders: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    made = {spare: tmp_path_factory.mktemp("files") / f"m{spare}.gguf" for spare in folders}
    for spare, file in made.items():
        write_export_gguf(folders[spare], file, {}, SILENT)
    return made


def read_tokens(file: Path) -> tuple[list[str], list[int]]:
    fields = gguf.GGUFReader(file).fields
    return fields[TOKENS].contents(), fields[KINDS].contents()


def read_written(file: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The library's tokenizer, and tokenizer_config.json."""
    with open_gguf(file) as source:
        config: dict[str, Any] = json.loads((source.folder / "tokenizer_config.json").read_text())
        return tokenizers.Tokenizer.from_file(str(source.folder / "tokenizer.json")), config


@pytest.mark.parametrize("spare", [0, 40])
def test_a_tokenizer_without_endoftext_keeps_the_tokens_of_its_file(
    spare: int, isolates: None, folders: dict[int, Path], files: dict[int, Path], tmp_path: Path, code_repository: Path
) -> None:
    tokens, _ = read_tokens(files[spare])
    assert "<|endoftext|>" not in tokens
    found, config = read_written(files[spare])
    assert [found.id_to_token(number) for number in range(len(tokens))] == tokens
    assert found.get_vocab_size() == len(tokens) and "<|endoftext|>" not in config.values()
    source = tokenizers.Tokenizer.from_file(str(folders[spare] / "tokenizer.json"))
    texts = [f"<|eot_id|>{prose(i)} <|endoftext|><|begin_of_text|>" for i in range(900, 940)]
    assert [found.encode(text).ids for text in texts] == [source.encode(text).ids for text in texts]
    facts = make_imported_workspace(tmp_path / "factory", ImportOptions(files[spare]), code_repository, SILENT)
    assert facts["release"] == 0 and facts["new_tokens"] == []


def test_a_special_token_outside_the_alphabet_of_bytes_stays_one_token(
    isolates: None, files: dict[int, Path], tmp_path: Path
) -> None:
    tokens, _ = read_tokens(files[0])
    at = tokens.index("<|eot_id|>")
    tokens[at] = EOT
    found, config = read_written(rewrite_gguf(files[0], tmp_path / "changed.gguf", {TOKENS: tokens}))
    assert found.encode(f"{EOT}a", add_special_tokens=False).ids[0] == at == found.token_to_id(EOT)
    assert found.get_vocab_size() == len(tokens) and config["eos_token"] == EOT


def test_a_file_whose_ids_transformers_changes_is_refused_by_the_first_of_them(
    isolates: None, files: dict[int, Path], tmp_path: Path
) -> None:
    """A token that is listed twice keeps its second id alone."""
    tokens, kinds = read_tokens(files[40])
    tokens[-1], tokens[-2] = tokens[300], tokens[400]
    file = rewrite_gguf(files[40], tmp_path / "changed.gguf", {TOKENS: tokens, KINDS: kinds})
    with pytest.raises(ImportRefusedError) as error, open_gguf(file):
        pass
    assert error.value.code == "gguf_source.other_token"
    assert (error.value.data["id"], error.value.data["token"]) == (300, repr(tokens[300]))
