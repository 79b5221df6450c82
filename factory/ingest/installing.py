"""Puts the tokenizer of a Hugging Face folder into a workspace before its first shard, as it is.

>>> import json, tempfile, tokenizers
>>> source = Path(tempfile.mkdtemp())
>>> inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2}, unk_token="<unk>"))
>>> _ = inner.add_special_tokens(["</s>"])
>>> inner.save(str(source / "tokenizer.json"))
>>> _ = (source / "chat_template.jinja").write_text("{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}")
>>> [(row.token, row.id) for row in list_missing_tokens(source)]
[('<|im_start|>', 3), ('<|im_end|>', 4)]
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from factory.core.errors import InputError
from factory.ingest import ledger_rows
from factory.ingest.tokenizer import FILES, Tokenizer, write_stated_ids
from factory.ingest.tokenizing.description import (
    CONFIG,
    GENERATION,
    ID_KEYS,
    LIBRARY,
    TEMPLATE,
    list_more_templates,
    read_chat_templates,
    read_optional_object,
    read_tokenizer_folder,
)
from factory.ingest.tokenizing.model_format import find_missing_special_tokens
from factory.ledger.ledger import tokenizers
from factory.ledger.plant import Plant
from kernels.contract.files import write_atomically

_LARGEST = 1 << 28  # bytes of one file


@dataclass(frozen=True)
class AddedRow:
    """A token that the chat template needs and the vocabulary lacked. The embedding needs a row ``id`` for it, for example the mean of all rows."""

    token: str
    id: int


@dataclass(frozen=True)
class InstalledTokenizer:
    """The workspace's tokenizer, and the rows that the embedding lacks for it."""

    tokenizer: Tokenizer
    added_rows: tuple[AddedRow, ...]


def list_missing_tokens(source: Path) -> tuple[AddedRow, ...]:
    """Return the special tokens that a folder's chat template writes and its vocabulary lacks, with the ids that they would get: those after the
    last. Raises: InputError for a folder without a tokenizer, or with a broken file."""
    found = read_tokenizer_folder(source, _read(source / LIBRARY))
    first = 1 + max(found.ids.values())
    return tuple(
        AddedRow(token, first + number)
        for number, token in enumerate(find_missing_special_tokens(found, with_structure=True))
    )


def install_model_tokenizer(
    source: Path, plant: Plant, embedding_rows: int | None = None, add_missing_tokens: bool = False
) -> InstalledTokenizer:
    """Copy the tokenizer of a model's folder into the workspace and record it in the ledger, before the first shard. The files are copied as they
    are, with the ids of the model's generation_config.json and config.json. A second call with the same folder changes nothing.

    ``embedding_rows``: how many ids the model can have. ``add_missing_tokens``: add the tokens that the chat template needs and the vocabulary lacks;
    without it they are an error.
    Raises: InputError, and leaves the workspace as it was, for a folder whose tokenizer or template cannot be used, for ids beyond the embedding, and
    if the ledger has another tokenizer.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer, added = prepare_tokenizer(source, folder, add_missing_tokens)
        if embedding_rows is not None and tokenizer.vocab_size - len(added) > embedding_rows:
            raise InputError(
                "ingest.ids_beyond_embedding",
                "{file} has ids up to {last}, but the model's embedding has {rows} rows. Use the tokenizer of this model",
                file=source / LIBRARY,
                last=tokenizer.vocab_size - len(added) - 1,
                rows=embedding_rows,
            )
        recorded = plant.ledger.select_first(sa.select(tokenizers))
        if recorded and recorded["sha256"] != tokenizer.sha256:
            raise InputError(
                "ingest.frozen_tokenizer",
                "{workspace} already has another tokenizer, and its data use the ids of that tokenizer. Use a new workspace for the tokenizer in "
                "{source}",
                workspace=plant.workspace.root,
                source=source,
            )
        target = plant.workspace.tokenizer
        target.mkdir(parents=True, exist_ok=True)
        names = [*(name for name in FILES if name != LIBRARY), *([] if tokenizer.is_own else [GENERATION])]
        for name in [name for name in names if not (folder / name).exists()]:
            (target / name).unlink(missing_ok=True)  # of another tokenizer that was never used
        for name in [
            *(name for name in names if (folder / name).exists()),
            LIBRARY,
        ]:  # tokenizer.json completes the folder
            write_atomically(target / name, (folder / name).read_bytes())
    installed = Tokenizer.load(target)
    assert installed.sha256 == tokenizer.sha256
    with plant.ledger.begin() as tx:
        ledger_rows.write_tokenizer(tx, installed, plant.ledger.to_stored_path(target))
    return InstalledTokenizer(installed, added)


def prepare_tokenizer(
    source: Path, folder: Path, add_missing_tokens: bool = False
) -> tuple[Tokenizer, tuple[AddedRow, ...]]:
    """Copy the tokenizer of a model's folder to ``folder`` as a workspace has it, and load it. Returns it and the tokens that were added.

    Raises: InputError that names the files of ``source``."""
    added = list_missing_tokens(source) if add_missing_tokens else ()
    _read(source / LIBRARY)
    for name in FILES:
        if (source / name).exists():
            (folder / name).write_bytes(_read(source / name))
    _list_templates(source, folder)
    if added:
        _add_tokens(folder / LIBRARY, added)
    (folder / GENERATION).write_text(json.dumps(_read_model_ids(source)), encoding="utf-8")
    tokenizer = Tokenizer.load(folder, shown_as=source)
    if tokenizer.is_own:
        (folder / GENERATION).unlink()
        return tokenizer, added
    write_stated_ids(tokenizer, folder)
    return Tokenizer.load(folder, shown_as=source), added


def _list_templates(source: Path, folder: Path) -> None:
    """Write the templates of additional_chat_templates/ into the key of tokenizer_config.json in ``folder``, because an export has no folders in it.
    Programs find the same templates there. Raises: InputError if two files of ``source`` have different templates."""
    config = read_optional_object(source / CONFIG)
    found = read_chat_templates(source, config)
    if not list_more_templates(source):
        return
    (folder / TEMPLATE).unlink(missing_ok=True)
    listed = [{"name": name, "template": text} for name, text in sorted(found.items())]
    (folder / CONFIG).write_text(
        json.dumps(config | {"chat_template": listed}, indent=1, ensure_ascii=False), encoding="utf-8"
    )


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > _LARGEST:
            raise OSError(f"it is larger than {_LARGEST >> 20} MiB")
        return path.read_bytes()
    except OSError as error:
        raise InputError(
            "ingest.tokenizer_file_missing",
            "{path} cannot be read: {reason}. A model's folder needs its tokenizer.json, as the library 'tokenizers' writes it",
            path=path,
            reason=error.strerror or str(error),
        ) from error


def _read_model_ids(source: Path) -> dict[str, Any]:
    """Return the ids that a model's files state: those of generation_config.json, else of config.json; ids that end generation from both."""
    generation, config = read_optional_object(source / GENERATION), read_optional_object(source / "config.json")
    text_config = config.get("text_config")
    found: dict[str, Any] = {}
    for stated in (generation, config, text_config if isinstance(text_config, dict) else {}):
        for key in ID_KEYS:
            value = stated.get(key)
            if key == "eos_token_id":
                more = value if isinstance(value, list) else [] if value is None else [value]
                found[key] = list(dict.fromkeys([*found.get(key, []), *more]))
            elif value is not None:
                found.setdefault(key, value)
    return found


def _add_tokens(path: Path, added: Sequence[AddedRow]) -> None:
    library = json.loads(path.read_bytes())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    library["added_tokens"] = [
        *(library.get("added_tokens") or []), *({"id": row.id, "content": row.token, **flags} for row in added)
    ]  # fmt: skip
    path.write_text(json.dumps(library, ensure_ascii=False), encoding="utf-8")
