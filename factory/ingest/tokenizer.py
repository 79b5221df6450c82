"""The workspace's tokenizer: it turns documents into token ids and back, and is frozen before the first shard.

The tokenizer is frozen because the model has learned its token ids. The ledger records its hash, and every later ingest checks it.
A tokenizer has one of two formats. The factory's own (``factory_format``) is a byte-level BPE that is trained once, on a bounded sample of the first
ingest, with ChatML. Any other tokenizer is used as it is, with its own chat template (``tokenizing``).

A document begins with BOS, if the tokenizer has one, and ends with the end token. In the factory's own format both are ``<|endoftext|>``, as in
GPT-2, so that the first token is predicted too.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     tokenizer = train_tokenizer(iter(["ab " * 9]), 300, Path(folder))
    ...     ids = tokenizer.encode("ab")
    ...     chat = [{"role": "user", "content": "ab"}]
    ...     tokenizer.encode_text("ab")[0].tolist() == [0, *ids, 0]
    ...     tokenizer.encode_chat_prompt(chat)[:2].tolist() == [0, 1]
    True
    True

A document cannot produce special tokens. Here the string ``<|im_end|>`` inside text or a message is encoded as ordinary
characters. Other programs match special tokens in the rendered string. The factory's own chat template therefore inserts a blank
(``<| im_end|>``), and refuses roles that could spell a special token (``chat_template``). A foreign template does neither, so for texts that spell a
special token other programs give other ids than the factory.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from factory.core.errors import InputError
from factory.ingest.chat_template import (
    CHAT_TEMPLATE,
    OLDER_TEMPLATES,
    TEMPLATE_WITHOUT_BOS,
    TEMPLATE_WITHOUT_CALLS,
    TEMPLATE_WITHOUT_CALLS_AND_BOS,
)
from factory.ingest.document import Content
from factory.ingest.factory_format import END as END
from factory.ingest.factory_format import IM_END as IM_END
from factory.ingest.factory_format import IM_START as IM_START
from factory.ingest.factory_format import SPECIAL as SPECIAL
from factory.ingest.factory_format import SPLIT_PATTERN as SPLIT_PATTERN
from factory.ingest.factory_format import FactoryFormat
from factory.ingest.shapes.chats import Structure
from factory.ingest.tokenizing.chat_rendering import DATE_OF_DOCUMENTS, ChatRefusedError
from factory.ingest.tokenizing.description import (
    CONFIG,
    GENERATION,
    ID_KEYS,
    LIBRARY,
    NAMES,
    TEMPLATE,
    read_optional_object,
    read_tokenizer_folder,
)
from factory.ingest.tokenizing.library_faults import library_faults
from factory.ingest.tokenizing.model_format import ModelFormat, find_structure_of_template
from kernels.contract.files import write_atomically
from kernels.contract.message import Message

FILES = (LIBRARY, CONFIG, NAMES, TEMPLATE)
_OWN_NAMES = {"eos_token": IM_END, "pad_token": END, "additional_special_tokens": [IM_START]}

Ids = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]


class Tokenizer:
    """A frozen tokenizer that was loaded from its folder. Several threads may use it at the same time.

    ``sha256``: the hash of tokenizer.json in the factory's own format; otherwise of all files that decide ids or chats. ``bos``: the ids with which
    a document begins, often none. ``end_token``: the id with which it ends. ``stop_ids``: ids that end generation. ``stop_token``: the id that closes
    an answer. ``special``: the id of each special token, by its text.
    """

    def __init__(self, folder: Path, form: FactoryFormat | ModelFormat, sha256: str) -> None:
        self.folder, self.sha256, self._form = folder, sha256, form
        self.vocab_size = form.vocab_size
        self.ids = form.ids
        self.bos, self.end_token, self.stop_ids = form.ids.begin, form.ids.end, form.ids.stop
        self.stop_token = form.ids.end if form.turn_end is None else form.turn_end
        self.special = dict(form.special)
        self.special_ids = frozenset(self.special.values())

    @classmethod
    @library_faults()
    def load(cls, folder: Path, shown_as: Path | None = None) -> Tokenizer:
        """Load the tokenizer of a folder. ``shown_as``: the folder that errors name, if ``folder`` is a copy of it.

        Raises: InputError when the folder has no tokenizer, or its files do not fit each other."""
        path = folder / LIBRARY
        try:
            data = path.read_bytes()
            inner = tokenizers.Tokenizer.from_buffer(data)
        except OSError as error:
            raise InputError(
                "ingest.no_tokenizer",
                "{folder} has no tokenizer ({error}). The first ingest trains one",
                folder=folder,
                error=error.strerror,
            ) from error
        except Exception as error:  # the library raises plain Exception for a broken file
            raise InputError(
                "ingest.not_a_tokenizer",
                "{path} is not a tokenizer: {error}",
                path=(shown_as or folder) / LIBRARY,
                error=error,
            ) from error
        if has_own_names(folder) and [inner.token_to_id(token) for token in SPECIAL] == [0, 1, 2]:
            own = FactoryFormat(inner)
            if own.ids.begin in ((), (0,)) and own.gives_library_ids():
                return cls(folder, own, hashlib.sha256(data).hexdigest())
        form = ModelFormat(read_tokenizer_folder(folder, data, shown_as))
        return cls(folder, form, _hash_files(folder, form))

    @property
    def is_own(self) -> bool:
        """Whether this is a tokenizer of the factory's own format, with the factory's chat template."""
        return isinstance(self._form, FactoryFormat)

    @property
    def is_lossless(self) -> bool:
        """Whether text decodes to itself. It does not if the tokenizer normalises text."""
        return self._form.is_lossless

    def has_id_gaps(self) -> bool:
        """Return whether the ids are not exactly 0 to ``vocab_size`` − 1. An embedding of ``vocab_size`` rows then lacks some ids."""
        return self._form.has_id_gaps()

    @property
    def chat_template(self) -> str | None:
        """Return the chat template with which exports are written; None if the tokenizer has none. The factory's own format has this factory's
        template, or an older one if the tokenizer was frozen with it."""
        if isinstance(self._form, ModelFormat):
            return self._form.found.chat_template
        if has_template_with_tool_calls(self.folder):
            return CHAT_TEMPLATE if self.bos else TEMPLATE_WITHOUT_BOS
        return TEMPLATE_WITHOUT_CALLS if self.bos else TEMPLATE_WITHOUT_CALLS_AND_BOS

    @property
    def bos_token(self) -> int | None:
        """The id of BOS, or None if the tokenizer has no BOS."""
        return self.ids.bos

    @property
    def named_ids(self) -> list[int | None]:
        """The ids of the tokens that tokenizer_config.json names BOS, EOS and padding token, as transformers reads them."""
        if isinstance(self._form, ModelFormat):
            return [self._form.found.name_token(f"{name}_token") for name in ("bos", "eos", "pad")]
        return [self.ids.bos, self.stop_token, self.end_token]

    @property
    def stop_config(self) -> dict[str, Any]:
        """The ids for a model's config.json: BOS, the ids that end generation, and the padding token."""
        eos = self.end_token if self.is_own or len(self.stop_ids) == 1 else list(self.stop_ids)
        return dict(zip(ID_KEYS, (self.ids.bos, eos, self.ids.pad), strict=True))

    @library_faults()
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return self._form.encode(text)

    def encode_text_prompt(self, text: str) -> Ids:
        """Return the ids of a text that a model is to continue, with BOS, as other programs encode it."""
        return np.array([*self.bos, *self.encode(text)], np.uint32)

    def encode_text(self, text: str) -> tuple[Ids, Mask]:
        """Return the ids of a plain document from BOS to the end token, and a mask of ones (all are supervised). Two arrays of shape [L]."""
        ids = np.array([*self.bos, *self.encode(text), self.end_token], np.uint32)
        return ids, np.ones(len(ids), bool)

    @library_faults()
    def encode_chat(
        self, messages: Sequence[dict[str, Any]], now: datetime.datetime = DATE_OF_DOCUMENTS, strict: bool = False
    ) -> tuple[Ids, Mask]:
        """Return the ids of a chat as its template writes it, which are those of transformers' ``apply_chat_template``, and a mask of the supervised
        ids: the assistant's content and what closes it, except in answers of weight 0. Two arrays of shape [L].

        ``now``: the date for templates that write one. ``strict``: also refuse a chat that the template of another model writes without one of its
        tools or calls. Raises: ``ChatRefusedError`` if the template refuses the chat, or the place of an answer in its text cannot be proven."""
        if isinstance(self._form, FactoryFormat):
            ids, mask = self._form.encode_messages(messages, now=now)
        else:
            ids, mask = self._form.encode_messages(messages, now=now, strict=strict)
        return np.array(ids, np.uint32), np.array(mask, bool)

    def encode_messages(self, messages: Sequence[dict[str, Any]]) -> tuple[Ids, Mask]:
        """Return the ids of a chat as a document, and its loss mask. In the factory's own format the end token follows the chat, without loss."""
        ids, mask = self.encode_chat(messages, strict=True)
        if not self.is_own:
            return ids, mask
        return np.append(ids, np.uint32(self.end_token)), np.append(mask, False)

    @library_faults()
    def encode_chat_prompt(self, messages: Sequence[dict[str, Any]], now: datetime.datetime = DATE_OF_DOCUMENTS) -> Ids:
        """Return the ids of a chat that waits for the assistant's answer. Raises: ``ChatRefusedError``."""
        return np.array(self._form.encode_prompt(messages, now=now), np.uint32)

    @library_faults()
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids without special tokens. Bytes that are not UTF-8 become U+FFFD."""
        return self._form.decode([int(i) for i in ids])

    def is_chat(self, ids: npt.NDArray[np.integer[Any]], mask: Mask) -> bool:
        """Return whether a document is a chat, from its ids and loss mask. In a text every token has loss, and no chat begins with loss."""
        return bool(self._form.turn_start in ids) if isinstance(self._form, FactoryFormat) else not bool(np.all(mask))

    @library_faults()
    def decode_document(self, ids: npt.NDArray[np.integer[Any]], mask: Mask) -> Content:
        """Return the document from which ``encode_text`` or ``encode_messages`` made these ids and this loss mask. A chat whose turns cannot
        be read back is returned as its text: ``{"rendered": [{"text", "loss"}, …]}``.

        Raises: ``ChatRefusedError`` if the text cannot be read back either. ``find_loss`` finds such a chat before it becomes a document."""
        if not self.is_chat(ids, mask):
            return {"text": self.decode(ids)}
        if isinstance(self._form, FactoryFormat):
            return {"messages": self._form.decode_messages(ids.tolist(), mask.tolist())}
        try:
            return {"messages": self._form.decode_messages(ids.tolist(), mask.tolist())}
        except ChatRefusedError:
            return {"rendered": self._form.decode_rendered(ids.tolist(), mask.tolist())}

    @library_faults()
    def encode_document(self, content: Content) -> tuple[Ids, Mask]:
        """Return the ids and the loss mask of what ``decode_document`` returns."""
        if "text" in content:
            return self.encode_text(content["text"])
        if "messages" in content:
            return self.encode_messages(content["messages"])
        assert isinstance(self._form, ModelFormat)
        ids, mask = self._form.encode_rendered(content["rendered"])
        return np.array(ids, np.uint32), np.array(mask, bool)

    def find_loss(self, content: Content, ids: Ids, mask: Mask) -> Message | None:
        """Return why a document cannot be read back from its ids, or None if it can.

        A tokenizer that normalises text (lower case, composed letters) changes a text, but the changed text must have the same ids."""
        if "text" in content:
            decoded = self.decode(ids)
            same = decoded == content["text"]
            if not same and not self.is_lossless:
                same = bool(np.array_equal(self.encode_text(decoded)[0], ids))
        elif self.is_own:
            rendered = "".join(f"{m['role']}\n{m['content']}\n" for m in content["messages"])
            same = self.decode(ids) == rendered
        else:
            try:
                same = bool(self.decode_document(ids, mask))
            except ChatRefusedError as error:
                return Message.from_json(error.message)
        return (
            None if same else Message("ingest.no_round_trip", "encoding and decoding by the tokenizer changes the text")
        )

    def spells_special_token(self, text: str) -> bool:
        """Return whether the text spells a special token. Programs that match special tokens in text encode such a text differently."""
        return any(token in text for token in self.special)

    def copy_to(self, folder: Path, keep_old_template: bool = False) -> None:
        """Copy the files that transformers and vLLM need into an export folder, with ``chat_template`` in the factory's own format and unchanged in
        any other. Write the tokenizer's ids into the folder's config.json and generation_config.json, because the trainer wrote those files without
        knowing the tokenizer.

        ``keep_old_template`` keeps the template that the tokenizer was trained with. It serves to make an older export again.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:  # tokenizer.json is there; transformers 5 writes no special_tokens_map.json
            if (self.folder / name).exists():
                shutil.copyfile(self.folder / name, folder / name)
        if not self.is_own:
            generation = {**self.stop_config, "eos_token_id": list(self.stop_ids)}
            _update_json(folder / "config.json", self.stop_config)
            _update_json(folder / GENERATION, {key: value for key, value in generation.items() if value is not None})
            return
        if self.bos:
            _update_json(folder / "config.json", {"bos_token_id": self.bos_token})
        template, own = folder / TEMPLATE, self.chat_template
        if not keep_old_template and own is not None and template.read_text(encoding="utf-8") in OLDER_TEMPLATES:
            named = folder / CONFIG
            _write_json(named, json.loads(named.read_text(encoding="utf-8")) | {"chat_template": own}, indent=1)
            template.write_text(own, encoding="utf-8")


def has_own_names(folder: Path) -> bool:
    """Return whether tokenizer_config.json in a folder names the special tokens as ``write_tokenizer_files`` does. True also without the file, and
    for a damaged file, which is not evidence of another tokenizer."""
    try:
        config = read_optional_object(folder / CONFIG)
    except InputError:
        return True
    return not config or all(config.get(key) == value for key, value in _OWN_NAMES.items())


def _hash_files(folder: Path, form: ModelFormat) -> str:
    """Return the hash of everything that decides ids or chats: the files that exist, and the ids that frame documents."""
    decisive: dict[str, Any] = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES if (folder / name).exists()
    }
    decisive["ids"] = [form.ids.begin, form.ids.end, form.ids.stop, form.ids.bos, form.ids.pad]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def write_stated_ids(tokenizer: Tokenizer, folder: Path) -> None:
    """Write generation_config.json with the ids of a foreign tokenizer into its folder, so that they do not depend on files of the model."""
    stated = {**tokenizer.stop_config, "eos_token_id": list(tokenizer.stop_ids)}
    write_atomically(
        folder / GENERATION, json.dumps({key: one for key, one in stated.items() if one is not None}, indent=1)
    )


def train_tokenizer(texts: Iterator[str], vocab_size: int, folder: Path) -> Tokenizer:
    """Train on ``texts`` and write the folder's files, each completely or not at all (tokenizer.json last).

    The same texts give the same file. A small sample may give fewer than ``vocab_size`` tokens, never more.
    """
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(
        single=f"{END}:0 $A:0", pair=f"{END}:0 $A:0 {END}:1 $B:1", special_tokens=[(END, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=32,  # in characters of byte-level text; longer tokens would be lines of dashes and the like
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    write_tokenizer_files(inner.to_str(pretty=True), True, folder)
    return Tokenizer.load(folder)


def write_tokenizer_files(tokenizer: str, has_bos: bool, folder: Path) -> None:
    """Write the files that belong to a tokenizer, and then ``tokenizer`` as tokenizer.json. Each file is written completely or not at all."""
    template = CHAT_TEMPLATE if has_bos else TEMPLATE_WITHOUT_BOS
    bos: dict[str, Any] = {"bos_token": END} if has_bos else {}
    names = {**bos, "eos_token": IM_END, "pad_token": END, "additional_special_tokens": [IM_START]}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **bos,
        "eos_token": IM_END,
        "pad_token": END,
        "unk_token": None,
        "additional_special_tokens": [IM_START],
        "add_bos_token": has_bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 20,
        "chat_template": template,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "chat_template.jinja", template)
    write_atomically(folder / "special_tokens_map.json", json.dumps(names, indent=1))
    write_atomically(folder / "tokenizer_config.json", json.dumps(config, indent=1))
    write_atomically(folder / "tokenizer.json", tokenizer)


def has_template_with_tool_calls(folder: Path) -> bool:
    """Return whether the chat template in a tokenizer's folder writes tools, tool calls and reasoning as ingest does. True if there is no tokenizer
    yet, and false for the tokenizer of another model."""
    if not has_own_names(folder):
        return False
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8") in (CHAT_TEMPLATE, TEMPLATE_WITHOUT_BOS)
    except FileNotFoundError:
        return True
    except (OSError, UnicodeDecodeError):
        return False


def find_structure(folder: Path) -> frozenset[Structure]:
    """Return which of tools, calls and reasoning the chat template in a tokenizer's folder takes as objects. The factory's own format takes none: it
    writes them as text. None also if there is no tokenizer yet, or if its files are damaged, which loading it reports."""
    if has_own_names(folder):
        return frozenset()
    try:
        return find_structure_of_template(read_tokenizer_folder(folder, (folder / LIBRARY).read_bytes()))
    except (OSError, InputError):
        return frozenset()


def list_special_tokens(folder: Path) -> tuple[str, ...]:
    """Return the texts of the special tokens of the tokenizer in a folder; the factory's own if there is none yet, or if its files are damaged, which
    loading the tokenizer reports."""
    try:
        return tuple(read_tokenizer_folder(folder, (folder / LIBRARY).read_bytes()).special)
    except (OSError, InputError):
        return SPECIAL


def contains_special_token(text: str, special: Iterable[str] = SPECIAL) -> bool:
    """Return whether the text spells a special token. Programs that match special tokens in text encode such a text differently."""
    return any(token in text for token in special)


def _write_json(path: Path, content: dict[str, Any], indent: int) -> None:
    path.write_text(json.dumps(content, indent=indent), encoding="utf-8")


def _update_json(path: Path, changes: dict[str, Any]) -> None:
    if path.exists():
        _write_json(path, json.loads(path.read_text(encoding="utf-8")) | changes, indent=2)
