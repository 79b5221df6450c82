"""Reads the folder of a tokenizer as transformers does: added tokens, special ids, how a document begins and ends, the chat template.

Four files can name special tokens: tokenizer.json, tokenizer_config.json, special_tokens_map.json and generation_config.json. Their rules are
those of transformers 5 (its class TokenizersBackend): a token that tokenizer_config.json names is an added token, and ``add_bos_token`` or
``add_eos_token`` there replaces the post-processor of tokenizer.json.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from factory.core.errors import InputError

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Names of a token that ends a document, by family: GPT-2, Qwen, SmolLM; Llama 3; Gemma; Llama 2, Mistral; DeepSeek; OLMo; BERT.
END_NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[EOS]", "[SEP]",
)  # fmt: skip
# The files of a tokenizer that transformers reads; only the first must exist. generation_config.json has the model's stop ids.
LIBRARY, CONFIG, NAMES, TEMPLATE, GENERATION = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
LEGACY_TEMPLATE, TEMPLATES = "chat_template.json", "additional_chat_templates"  # a file, and a folder of files
DEFAULT, TOOL_USE = "default", "tool_use"  # names of chat templates that transformers chooses by itself
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class TokenizerFolder:
    """The content of a tokenizer's folder.

    ``library``: tokenizer.json, with the added tokens and the post-processor that transformers gives it. ``config``: tokenizer_config.json.
    ``names``: the texts of named tokens, by name. ``stated_ids``: what generation_config.json says under ``ID_KEYS``.
    ``missing``: named tokens that the vocabulary lacks, by name; transformers would give them new ids. ``templates``: the chat templates, by name.
    """

    folder: Path
    sha256_of_library: str
    library: Mapping[str, Any]
    config: Mapping[str, Any]
    names: Mapping[str, str]
    stated_ids: Mapping[str, Any]
    templates: Mapping[str, str]
    missing: Mapping[str, str]

    @property
    def chat_template(self) -> str | None:
        """The chat template for chats without tools; None if there is none."""
        return self.templates.get(DEFAULT)

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each token of the vocabulary, added tokens included."""
        vocabulary = read_vocabulary(self.library["model"])
        return vocabulary | {token["content"]: token["id"] for token in self.library["added_tokens"]}

    @cached_property
    def special(self) -> dict[str, int]:
        """The id of each special token, by its text."""
        return {token["content"]: token["id"] for token in self.library["added_tokens"] if token["special"]}

    @property
    def template_variables(self) -> dict[str, str]:
        """The named tokens that a chat template can use as variables."""
        return dict(self.names)

    def name_token(self, name: str) -> int | None:
        """Return the id of a named token, such as 'eos_token'. None if no file names it, or the vocabulary lacks it."""
        return self.ids.get(self.names.get(name, ""))


@dataclass(frozen=True)
class SpecialIds:
    """The ids that frame documents, and the ids at which generation stops.

    ``begin``: the ids with which a document begins (BOS), often none. ``end``: the id with which a document ends. ``stop``: ids that end
    generation, ``end`` first. ``bos``, ``pad``: ids of those names, if any.
    """

    begin: tuple[int, ...]
    end: int
    stop: tuple[int, ...]
    bos: int | None
    pad: int | None


def read_tokenizer_folder(folder: Path, data: bytes, shown_as: Path | None = None) -> TokenizerFolder:
    """Read a tokenizer's folder. ``data``: its tokenizer.json. ``shown_as``: the folder that errors name.

    Raises: InputError if a file is broken, or two chat templates differ."""
    path = folder / LIBRARY
    try:
        library = json.loads(data)
        library = {**library, "added_tokens": library.get("added_tokens") or []}
        read_vocabulary(library["model"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            "ingest.odd_tokenizer",
            "{path} has no vocabulary that can be read: {error}",
            path=path,
            error=repr(error)[:300],
        ) from error
    config = read_optional_object(folder / CONFIG, shown_as)
    names = dict(_names(config, read_optional_object(folder / NAMES, shown_as)))
    library, missing = _with_named_tokens(library, config, names)
    named = {name: text for name, text in names.items() if name in NAMED}
    return TokenizerFolder(
        shown_as or folder,
        hashlib.sha256(data).hexdigest(),
        _with_post_processor(library, config, named),
        config,
        named,
        {key: value for key, value in read_optional_object(folder / GENERATION, shown_as).items() if key in ID_KEYS},
        read_chat_templates(folder, config, shown_as),
        missing,
    )


def read_optional_object(path: Path, shown_as: Path | None = None) -> dict[str, Any]:
    """Return the JSON object in a file; {} if there is no such file. ``shown_as``: the folder that errors name, if the file is a copy.

    Raises: InputError for a file with anything else."""
    shown = path if shown_as is None else shown_as / path.name
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            "ingest.bad_tokenizer_file", "{path} is not JSON: {error}", path=shown, error=str(error)[:200]
        ) from error
    if not isinstance(found, dict):
        raise InputError(
            "ingest.tokenizer_file_type",
            "{path} must contain a JSON object, not {kind}",
            path=shown,
            kind=type(found).__name__,
        )
    return found


def read_vocabulary(model: Mapping[str, Any]) -> dict[str, int]:
    """Return the id of each entry of a tokenizer model (BPE, WordPiece, WordLevel: an object; Unigram: a list of pieces and scores).

    >>> read_vocabulary({"vocab": [["a", -1.0], ["b", -2.0]]}), read_vocabulary({"vocab": {"a": 3}})
    ({'a': 0, 'b': 1}, {'a': 3})
    """
    found = model["vocab"]
    if isinstance(found, Mapping):
        return {str(token): int(number) for token, number in found.items()}
    return {str(piece): number for number, (piece, _) in enumerate(found)}


def list_more_templates(folder: Path) -> list[Path]:
    """Return the files of chat templates in a tokenizer's folder beside its main one, each named after its template."""
    return sorted((folder / TEMPLATES).glob("*.jinja")) if (folder / TEMPLATES).is_dir() else []


def read_chat_templates(folder: Path, config: Mapping[str, Any], shown_as: Path | None = None) -> dict[str, str]:
    """Return the chat templates of a folder by name, as transformers 5 finds them. It takes 'tool_use' for chats with tools, else 'default'.

    transformers reads chat_template.jinja as 'default', and each file of additional_chat_templates/ by its name. If there are such files, it does not
    look at the key of tokenizer_config.json. Its processors, and vLLM through them, read chat_template.json first. Therefore all texts with one
    name must be equal. Raises: InputError that names two different files, or a file that transformers' tokenizers do not read.
    """
    shown = shown_as or folder
    places: dict[str, list[tuple[str, str]]] = {}  # by name of the template: where it stands, and its text
    for name, path in [(DEFAULT, folder / TEMPLATE), *((path.stem, path) for path in list_more_templates(folder))]:
        try:
            text = path.read_bytes().decode("utf-8")
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                "ingest.unreadable_template", "{path} cannot be read: {error}", path=path, error=str(error)
            ) from error
        places.setdefault(name, []).append((str(path.relative_to(folder)), text))
    of_files = {name: found[0][1] for name, found in places.items()}
    key = config.get("chat_template")
    listed = key if isinstance(key, list) else [{"name": DEFAULT, "template": key}]
    of_config = {
        str(entry.get("name")): entry["template"]
        for entry in listed
        if isinstance(entry, dict) and isinstance(entry.get("template"), str)
    }
    legacy = read_optional_object(folder / LEGACY_TEMPLATE, shown_as).get("chat_template")
    for name, text in of_config.items():
        places.setdefault(name, []).append((CONFIG, text))
    if isinstance(legacy, str):
        places.setdefault(DEFAULT, []).append((LEGACY_TEMPLATE, legacy))
    for name, found in places.items():
        for where, text in found[1:]:
            if text.removesuffix("\n") != found[0][1].removesuffix("\n"):
                raise InputError(
                    "ingest.two_templates",
                    "{folder} has two different chat templates of the name {name!r}: in {first} and in {second}. Programs read one or the other. "
                    "Remove the wrong one",
                    folder=shown, name=name[:40], first=found[0][0], second=where,
                )  # fmt: skip
    chosen = of_files or of_config
    if isinstance(legacy, str) and DEFAULT not in chosen:
        raise InputError(
            "ingest.legacy_template",
            "{path} has a chat template, which processors read and tokenizers do not. Write its text into {wanted}, or remove the file",
            path=shown / LEGACY_TEMPLATE, wanted=shown / TEMPLATE,
        )  # fmt: skip
    if of_files and DEFAULT not in of_files:
        raise InputError(
            "ingest.no_default_template",
            "{folder} has the chat templates {names}, but none of the name 'default', so chats without tools cannot be written. Add {wanted}",
            folder=shown, names=sorted(of_files)[:9], wanted=TEMPLATE,
        )  # fmt: skip
    return chosen


def find_special_ids(found: TokenizerFolder, inner: tokenizers.Tokenizer) -> SpecialIds:
    """Decide with which ids documents begin and end, and at which ids generation stops. ``inner``: the library's tokenizer.

    A document begins with what the post-processor puts before a text. It ends with the token that has one of ``END_NAMES``, else with the
    model's ``eos_token``: a chat model's ``eos_token`` often ends a turn. Raises: InputError if no token can end a document, or a stated id
    is not an id of the vocabulary.
    """
    begin = _begin(inner)
    eos, pad, bos = (found.name_token(f"{name}_token") for name in ("eos", "pad", "bos"))
    stated = found.stated_ids.get("eos_token_id")
    listed = [stated] if isinstance(stated, int) else stated if isinstance(stated, list) else []
    if bad := [number for number in listed if type(number) is not int or number not in found.ids.values()]:
        raise InputError(
            "ingest.stop_id_unknown",
            "{file}: eos_token_id has the id {id}, but the tokenizer has no token with this id. Correct the file or the tokenizer",
            file=found.folder / GENERATION,
            id=str(bad[0])[:40],
        )
    last = next((found.special[name] for name in END_NAMES if name in found.special), None)
    if last is None:
        last = eos if eos is not None else next(iter(listed), None)
    if last is None:
        raise InputError(
            "ingest.no_end_token",
            "The tokenizer in {folder} has no token that ends a document. Name it as 'eos_token' in {config}",
            folder=found.folder,
            config=found.folder / CONFIG,
        )
    stop = tuple(dict.fromkeys([last, *listed, *([eos] if eos is not None else [])]))
    stated_pad, stated_bos = found.stated_ids.get("pad_token_id"), found.stated_ids.get("bos_token_id")
    known = set(found.ids.values())
    return SpecialIds(
        begin,
        last,
        stop,
        next((number for number in (bos, stated_bos, *begin[:1]) if number in known), None),
        next((number for number in (pad, stated_pad, last) if number in known), None),
    )


def _begin(inner: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Return the ids that the library puts before a text."""
    plain, framed = (inner.encode("a", add_special_tokens=special).ids for special in (False, True))
    places = [at for at in range(len(framed) - len(plain) + 1) if framed[at : at + len(plain)] == plain]
    return tuple(framed[: places[0]]) if places else ()


def _names(config: Mapping[str, Any], mapped: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in NAMED:
        text = _text(config.get(name)) or _text(mapped.get(name))
        if text:
            yield name, text
    for source in (config, mapped):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            more = source.get(key) or []
            for number, value in enumerate(more.values() if isinstance(more, Mapping) else more):
                if text := _text(value):
                    yield f"{key}[{number}]", text


def _text(value: Any) -> str:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else ""


def _with_named_tokens(
    library: Mapping[str, Any], config: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return tokenizer.json with the special tokens that other files name, and those of them that the vocabulary lacks."""
    added = [dict(token) for token in library["added_tokens"]]
    vocabulary = read_vocabulary(library["model"])
    there = {token["content"]: token for token in added}
    listed = config.get("added_tokens_decoder")
    flags = {
        entry["content"]: entry
        for entry in (listed.values() if isinstance(listed, Mapping) else ())
        if isinstance(entry, Mapping) and isinstance(entry.get("content"), str)
    }
    missing: dict[str, str] = {}
    for name, text in (*((f"added_tokens_decoder {text}", text) for text in flags), *names.items()):
        if text in there:
            if name in NAMED:
                there[text]["special"] = True  # transformers skips a named token in decoded text, whatever its flag
        elif text in vocabulary:
            flag = flags.get(text, {})
            token: dict[str, Any] = {
                key: bool(flag.get(key, False)) for key in ("single_word", "lstrip", "rstrip", "normalized")
            }
            token |= {"id": vocabulary[text], "content": text, "special": bool(flag.get("special", True))}
            added.append(token)
            there[text] = token
        else:
            missing.setdefault(name, text)
    added.sort(key=lambda token: int(token["id"]))
    return {**library, "added_tokens": added}, missing


def _with_post_processor(
    library: dict[str, Any], config: Mapping[str, Any], names: Mapping[str, str]
) -> Mapping[str, Any]:
    """Return tokenizer.json with the post-processor that ``add_bos_token`` and ``add_eos_token`` of tokenizer_config.json ask for."""
    if "add_bos_token" not in config and "add_eos_token" not in config and library.get("post_processor") is not None:
        return library
    ids = read_vocabulary(library["model"]) | {token["content"]: token["id"] for token in library["added_tokens"]}
    parts: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    specials: dict[str, Any] = {}
    for name, first in (("bos_token", True), ("eos_token", False)):
        text = names.get(name, "")
        if config.get(f"add_{name}") and text in ids:
            part = {"SpecialToken": {"id": text, "type_id": 0}}
            parts = [part, *parts] if first else [*parts, part]
            specials[text] = {"id": text, "ids": [ids[text]], "tokens": [text]}
    pair = [*parts, {"Sequence": {"id": "B", "type_id": 1}}]
    made = {"type": "TemplateProcessing", "single": parts, "pair": pair, "special_tokens": specials}
    return {**library, "post_processor": made}
