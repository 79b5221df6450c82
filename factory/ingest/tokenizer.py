"""The tokenizer: a byte-level BPE that is trained once, on a bounded sample of the first ingest, and then frozen.

The tokenizer is frozen because the model has learned its token ids. The ledger records its hash, and every later ingest checks it.
Text is split with the Qwen2 pattern (numbers digit by digit, runs of line ends together: both matter for code) and encoded
as bytes, so every string has ids and decodes to itself. Chat is ChatML.

A document begins and ends with ``<|endoftext|>`` (one token is BOS and end, as in GPT-2), so that its first token is predicted too.
The post-processor in tokenizer.json adds BOS in other programs. A tokenizer of an older factory has no post-processor and no BOS.

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
characters. Other programs match special tokens in the rendered string, so the exported chat template inserts a blank
(``<| im_end|>``), and refuses roles that could spell a special token (``chat_template``).
"""

from __future__ import annotations

import hashlib
import json
import re
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
from factory.ingest.shapes.chats import has_loss, make_turn
from factory.ingest.tokenizer_probes import PROBES
from kernels.contract.files import write_atomically
from kernels.contract.message import Message

END, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END, IM_START, IM_END)  # their ids are 0, 1, 2
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

# Qwen2's split pattern (Qwen technical report, transformers' Qwen2Tokenizer).
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The same pattern for ASCII text, in the syntax of the standard library. On ASCII text the two patterns agree, and a table of known pieces
# then makes encoding three times as fast (4 instead of 1.5 MB/s on a core).
_ASCII_PATTERN = re.compile(
    r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    re.ASCII,
)
# No piece contains a line end and a visible character after it, so text can be cut between the two.
_SEGMENT = re.compile(r"(?<=\n)(?=\S)")
_PIECES_AT_MOST = 300_000  # a larger table of pieces is cleared
_LONGEST_PIECE = 64  # characters; longer pieces are not put in the table

_ADDED_AT_MOST = 256  # the spelling of at most this many added tokens is checked

_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


Ids = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]


class Tokenizer:
    """A frozen tokenizer that was loaded from its folder. Several threads may use it at the same time."""

    def __init__(self, folder: Path, inner: tokenizers.Tokenizer, sha256: str) -> None:
        self.folder = folder
        self.sha256 = sha256  # the hash of tokenizer.json
        self._inner = inner
        self._inner.encode_special_tokens = True  # special tokens in text are encoded as ordinary characters
        self.vocab_size = inner.get_vocab_size()
        self.end_token, self.start_token, self.stop_token = range(len(SPECIAL))
        self.bos: tuple[int, ...] = tuple(inner.encode("").ids)  # the ids with which a document begins: (0,) or ()
        self._pieces: dict[str, list[int]] = {}
        self._line_end = inner.encode("\n", add_special_tokens=False).ids

    @classmethod
    def load(cls, folder: Path, check_encoding: bool = True) -> Tokenizer:
        """Load the tokenizer of a folder. With ``check_encoding``, also check that the tokenizer splits text as this factory does.

        Raises: InputError when the folder has no tokenizer that this factory can use."""
        path = folder / "tokenizer.json"
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
                "ingest.not_a_tokenizer", "{path} is not a tokenizer: {error}", path=path, error=error
            ) from error
        if [inner.token_to_id(token) for token in SPECIAL] != [0, 1, 2]:
            raise _foreign(
                path,
                Message("ingest.special_ids", "the tokens with the ids 0, 1 and 2 must be {tokens}", tokens=SPECIAL),
            )
        if inner.encode("").ids not in ([], [0]):
            raise _foreign(
                path,
                Message(
                    "ingest.bos", "the tokenizer must begin a document with {token} or with no special token", token=END
                ),
            )
        tokenizer = cls(folder, inner, hashlib.sha256(data).hexdigest())
        if check_encoding and (wrong := tokenizer.find_encoding_difference()):
            raise _foreign(path, wrong)
        return tokenizer

    def find_encoding_difference(self) -> Message | None:
        """Return how this factory's ids differ from the ids of the tokenizer's own library, or None if they are equal.

        Both encode ``PROBES`` and the spelling of every added token. At least one of these texts gets other ids, or decodes to another text, if the
        tokenizer has another split pattern, a normaliser, an added leading blank, or words that are matched as a whole.
        """
        added = [token.content for token in self._inner.get_added_tokens_decoder().values()]
        for text in (*PROBES, *(f"a {word} b{word}" for word in added[:_ADDED_AT_MOST])):
            theirs, ours = self._inner.encode(text, add_special_tokens=False).ids, self.encode(text)
            if theirs != ours:
                return Message(
                    "ingest.other_ids",
                    "the tokenizer encodes {text!r} as {theirs}, but this factory encodes the text as {ours}. The split pattern of the "
                    "tokenizer may differ",
                    text=text[:40],
                    theirs=_shown(theirs),
                    ours=_shown(ours),
                )
            if self.decode(ours) != text:
                return Message(
                    "ingest.other_text",
                    "the tokenizer encodes {text!r} and decodes the ids as {back!r}, which is another text",
                    text=text[:40],
                    back=self.decode(ours)[:40],
                )
        return None

    def has_id_gaps(self) -> bool:
        """Return whether the ids are not exactly 0 to ``vocab_size`` − 1. An embedding of ``vocab_size`` rows then lacks some ids."""
        return sorted(self._inner.get_vocab().values()) != list(range(self.vocab_size))

    @property
    def chat_template(self) -> str:
        """Return this factory's chat template for this tokenizer, or an older template if the tokenizer was frozen with it."""
        if has_template_with_tool_calls(self.folder):
            return CHAT_TEMPLATE if self.bos else TEMPLATE_WITHOUT_BOS
        return TEMPLATE_WITHOUT_CALLS if self.bos else TEMPLATE_WITHOUT_CALLS_AND_BOS

    @property
    def bos_token(self) -> int | None:
        """The id of BOS, or None if the tokenizer has no BOS."""
        return next(iter(self.bos), None)

    def encode_text_prompt(self, text: str) -> Ids:
        """Return the ids of a text that a model is to continue, with BOS, as other programs encode it."""
        return np.array([*self.bos, *self.encode(text)], np.uint32)

    def encode_text(self, text: str) -> tuple[Ids, Mask]:
        """Return the ids of a plain document from BOS to the end token, and a mask of ones (all are supervised). Two arrays of shape [L]."""
        ids = np.array([*self.bos, *self.encode(text), self.end_token], np.uint32)
        return ids, np.ones(len(ids), bool)

    def encode_messages(self, messages: Sequence[dict[str, Any]]) -> tuple[Ids, Mask]:
        """Return the ids of a chat from BOS to the end token, and a mask of the supervised ids: the assistant's content and its closing
        ``<|im_end|>``, except in answers of weight 0. Two arrays of shape [L]."""
        ids, mask = self._render(messages)
        ids.append(self.end_token)
        mask.append(False)
        return np.array(ids, np.uint32), np.array(mask, bool)

    def encode_chat_prompt(self, messages: Sequence[dict[str, Any]]) -> Ids:
        """Return the ids of a chat that waits for the assistant's answer."""
        ids, _ = self._render(messages)
        ids.append(self.start_token)
        ids += self._inner.encode("assistant\n", add_special_tokens=False).ids
        return np.array(ids, np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids without special tokens. Bytes that are not UTF-8 become U+FFFD."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def decode_document(self, ids: npt.NDArray[np.integer[Any]], mask: Mask) -> Content:
        """Return the document from which ``encode_text`` or ``encode_messages`` made these ids and this loss mask."""
        if self.start_token not in ids:
            return {"text": self.decode(ids)}
        starts, stops = np.flatnonzero(ids == self.start_token), np.flatnonzero(ids == self.stop_token)
        turns = ((*self.decode(ids[a + 1 : b]).split("\n", 1), mask[b]) for a, b in zip(starts, stops, strict=True))
        return {"messages": [make_turn(role, content, bool(learned)) for role, content, learned in turns]}

    def copy_to(self, folder: Path, keep_old_template: bool = False) -> None:
        """Copy the files that transformers and vLLM need, with ``chat_template``, into an export folder. Add BOS to the folder's config.json,
        because the trainer wrote that file without knowing the tokenizer.

        ``keep_old_template`` keeps the template that the tokenizer was trained with. It serves to make an older export again.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copyfile(self.folder / name, folder / name)
        config = folder / "config.json"
        if self.bos and config.exists():
            _write_json(
                config, json.loads(config.read_text(encoding="utf-8")) | {"bos_token_id": self.bos_token}, indent=2
            )
        template = folder / "chat_template.jinja"
        if not keep_old_template and template.read_text(encoding="utf-8") in OLDER_TEMPLATES:
            named = folder / "tokenizer_config.json"
            _write_json(
                named, json.loads(named.read_text(encoding="utf-8")) | {"chat_template": self.chat_template}, indent=1
            )
            template.write_text(self.chat_template, encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        if text.isascii():
            return self._ascii_ids(text)
        ids: list[int] = []
        for segment in _SEGMENT.split(text):
            if segment.isascii():
                ids += self._ascii_ids(segment)
            else:
                ids += self._inner.encode(segment, add_special_tokens=False).ids
        return ids

    def _ascii_ids(self, text: str) -> list[int]:
        known = self._pieces
        if len(known) > _PIECES_AT_MOST:
            known = self._pieces = {}
        ids: list[int] = []
        for piece in _ASCII_PATTERN.findall(text):
            found = known.get(piece)
            if found is None:
                ((spelled, _),) = _BYTES.pre_tokenize_str(piece)
                found = [token.id for token in self._inner.model.tokenize(spelled)]
                if len(piece) <= _LONGEST_PIECE:
                    known[piece] = found
            ids += found
        return ids

    def _render(self, messages: Sequence[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        ids, mask = list(self.bos), [False] * len(self.bos)
        for message in messages:
            role, content = message["role"], message["content"]
            answer = has_loss(message)
            head, body = self._message(f"{role}\n", content)
            ids += [self.start_token, *head, *body, self.stop_token, *self._line_end]
            mask += [False] * (1 + len(head)) + [answer] * (len(body) + 1)
            mask += [False] * len(self._line_end)
        return ids, mask

    def _message(self, head: str, content: str) -> tuple[list[int], list[int]]:
        """Return the ids of role and content, as if both were encoded as one string. Programs that render the chat template to a string encode it
        so."""
        if not content[:1].isspace():  # then no piece contains the line end between the two
            return self.encode(head), self.encode(content)
        encoded = self._inner.encode(head + content, add_special_tokens=False)
        cut = sum(start < len(head) for start, _ in encoded.offsets)
        return encoded.ids[:cut], encoded.ids[cut:]


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
    yet."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8") in (CHAT_TEMPLATE, TEMPLATE_WITHOUT_BOS)
    except FileNotFoundError:
        return True
    except (OSError, UnicodeDecodeError):
        return False


def _foreign(path: Path, why: Message) -> InputError:
    return InputError(
        "ingest.foreign_tokenizer", "{path} cannot be used as this factory's tokenizer: {why}", path=path, why=why
    )


def _shown(ids: list[int]) -> str:
    return f"[{', '.join(map(str, ids[:6]))}{', …' if len(ids) > 6 else ''}]"


def _write_json(path: Path, content: dict[str, Any], indent: int) -> None:
    path.write_text(json.dumps(content, indent=indent), encoding="utf-8")


def contains_special_token(text: str) -> bool:
    """Return whether the text spells a special token. Programs that match special tokens in text encode such a text differently."""
    return any(token in text for token in SPECIAL)
