"""The tokenizer: byte-level BPE, trained once on a bounded sample of the first ingest, then frozen.

It is frozen because the trunk has learned its token ids: the ledger records its hash, and every later ingest checks it.
Text is split with the Qwen2 pattern (numbers digit by digit, runs of line ends together: both matter for code) and encoded
as bytes, so every string has ids and decodes to itself. Chat is ChatML.

A document begins and ends with ``<|endoftext|>`` (as GPT-2 has it, one token is BOS and end), so that its first token is predicted
too. tokenizer.json says so to other programs, in its post-processor; a tokenizer without one, which an older factory trained, has no BOS.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     tokenizer = train(iter(["ab " * 9]), 300, Path(folder))
    ...     ids = tokenizer.ids("ab")
    ...     chat = [{"role": "user", "content": "ab"}]
    ...     tokenizer.encode_text("ab")[0].tolist() == [0, *ids, 0]
    ...     tokenizer.prompt(chat)[:2].tolist() == [0, 1]
    True
    True

A document cannot produce special tokens: the string ``<|im_end|>`` inside text or a message is encoded as ordinary
characters here, and the exported chat template breaks it with a blank (``<| im_end|>``), because other programs match
special tokens in the rendered string. Roles that could spell them are refused there (``chat_template``).
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
    PLAIN_TEMPLATE,
    PLAIN_WITHOUT_BOS,
    TEMPLATE_WITHOUT_BOS,
)
from factory.ingest.document import Content
from factory.ingest.shapes.chats import carries_loss, turn_of
from kernels.contract.files import write_atomically

END, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END, IM_START, IM_END)  # their ids are 0, 1, 2
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

# Qwen2's split pattern (Qwen technical report, transformers' Qwen2Tokenizer).
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The same pattern for ASCII text, in the standard library's regex: without letters, digits or blanks beyond ASCII the two
# agree, and a table of known pieces then makes encoding three times as fast (4 instead of 1.5 MB/s on a core).
_ASCII_PATTERN = re.compile(
    r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    re.ASCII,
)
# No piece spans a line end and the visible character after it, so text may be cut there.
_SEGMENT = re.compile(r"(?<=\n)(?=\S)")
_PIECES_AT_MOST = 300_000  # pieces in the table; then it is cleared
_LONGEST_PIECE = 64  # characters; longer pieces are not put in the table

# The corners in which split patterns and normalisers differ: contractions, numbers, blanks, line ends, composed letters, scripts.
PROBES = (
    "I'll say it's DON'T, they've; we'RE here 'twas",
    "in 2024 the 1234567 of 12.5% and v1.0.3, ½ x² Ⅷ ٣٤٥",
    "def f(x):\n    return x  # twice\n\n\n\tdone\r\n   \n  end  ",
    "  leading, two  inner,   three and trailing   ",
    "http://a.b/c?d=e_f&g=--h!!! ...\n\n(*[]{}*)<|>\x0b\x0c",
    "naïve café cafe\u0301 ſ \u212b ﬁ straße Ωμέγα",
    "日本語の文章です。中文字符，한국어 ไทย हिन्दी עברית",
    "emoji 👩‍👩‍👧 ☃\ufe0f\u00a0nbsp\u2003em\u200bzero\u2028line",
    "CamelCaseHTTPServer snake_case_42 ALLCAPS iOS x1y2",
    "\n",
    " ",
    "",
)
_ADDED_AT_MOST = 256  # added tokens whose spelling is tried

_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


Ids = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]


class Tokenizer:
    """A frozen tokenizer, as loaded from its folder. Safe to use from several threads."""

    def __init__(self, folder: Path, inner: tokenizers.Tokenizer, sha256: str) -> None:
        self.folder = folder
        self.sha256 = sha256  # of tokenizer.json
        self._inner = inner
        self._inner.encode_special_tokens = True  # special tokens in text are ordinary characters
        self.vocab_size = inner.get_vocab_size()
        self.end_token, self.start_token, self.stop_token = range(len(SPECIAL))
        self.bos: tuple[int, ...] = tuple(inner.encode("").ids)  # what a document begins with: (0,), or nothing
        self._pieces: dict[str, list[int]] = {}
        self._line_end = inner.encode("\n", add_special_tokens=False).ids

    @classmethod
    def load(cls, folder: Path, probed: bool = True) -> Tokenizer:
        """Raises: InputError when the folder holds no tokenizer of this factory. ``probed``: also when it splits text otherwise than this factory
        does; who encodes nothing with it has checks of its own."""
        path = folder / "tokenizer.json"
        try:
            data = path.read_bytes()
            inner = tokenizers.Tokenizer.from_buffer(data)
        except OSError as error:
            raise InputError(f"{folder} has no tokenizer: {error.strerror}; the first ingest trains it") from error
        except Exception as error:  # the library raises bare Exception for a broken file
            raise InputError(f"{path} is not a tokenizer: {error}") from error
        if [inner.token_to_id(token) for token in SPECIAL] != [0, 1, 2]:
            raise InputError(f"{path} is not a tokenizer of this factory: ids 0, 1, 2 must be {', '.join(SPECIAL)}")
        if inner.encode("").ids not in ([], [0]):
            raise InputError(
                f"{path} is not a tokenizer of this factory: documents must begin with {END} or with nothing"
            )
        tokenizer = cls(folder, inner, hashlib.sha256(data).hexdigest())
        if probed and (wrong := tokenizer.misread()):
            raise InputError(f"{path} is not a tokenizer of this factory: {wrong}")
        return tokenizer

    def misread(self) -> str:
        """How this factory would read the tokenizer otherwise than its own library does; empty: not at all.

        Both encode ``PROBES`` and the spelling of every token that is added to the vocabulary: another split pattern, a normaliser, a blank put
        before the text, or words that are matched whole give other ids in some of them, or another text back.
        """
        added = [token.content for token in self._inner.get_added_tokens_decoder().values()]
        for text in (*PROBES, *(f"a {word} b{word}" for word in added[:_ADDED_AT_MOST])):
            theirs, ours = self._inner.encode(text, add_special_tokens=False).ids, self.ids(text)
            if theirs != ours:
                return f"of {text[:40]!r} it makes the ids {_shown(theirs)}, which would be read as {_shown(ours)} here (another split pattern?)"
            if self.decode(ours) != text:
                return f"of {text[:40]!r} its ids give back {self.decode(ours)[:40]!r}"
        return ""

    def has_gaps(self) -> bool:
        """Are its ids other than 0 to ``vocab_size`` − 1? Then an embedding of that many rows lacks some."""
        return sorted(self._inner.get_vocab().values()) != list(range(self.vocab_size))

    @property
    def chat_template(self) -> str:
        """This factory's template, as it must be for this tokenizer: an older one, where it was frozen with that."""
        if shows_calls(self.folder):
            return CHAT_TEMPLATE if self.bos else TEMPLATE_WITHOUT_BOS
        return PLAIN_TEMPLATE if self.bos else PLAIN_WITHOUT_BOS

    @property
    def bos_token(self) -> int | None:
        """The id of BOS, where there is one."""
        return next(iter(self.bos), None)

    def text_prompt(self, text: str) -> Ids:
        """Ids of a text that is to be continued, as other programs encode one: with BOS."""
        return np.array([*self.bos, *self.ids(text)], np.uint32)

    def encode_text(self, text: str) -> tuple[Ids, Mask]:
        """Ids of a plain document from BOS to the end token, all of them supervised: two arrays of shape [L]."""
        ids = np.array([*self.bos, *self.ids(text), self.end_token], np.uint32)
        return ids, np.ones(len(ids), bool)

    def encode_messages(self, messages: Sequence[dict[str, Any]]) -> tuple[Ids, Mask]:
        """Ids of a chat from BOS to the end token; supervised are the assistant's content and its closing
        ``<|im_end|>``, but for answers of weight 0."""
        ids, mask = self._render(messages)
        ids.append(self.end_token)
        mask.append(False)
        return np.array(ids, np.uint32), np.array(mask, bool)

    def prompt(self, messages: Sequence[dict[str, Any]]) -> Ids:
        """Ids of a chat that waits for the assistant's answer."""
        ids, _ = self._render(messages)
        ids.append(self.start_token)
        ids += self._inner.encode("assistant\n", add_special_tokens=False).ids
        return np.array(ids, np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens left out; bytes that are not UTF-8 become U+FFFD."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def content(self, ids: npt.NDArray[np.integer[Any]], mask: Mask) -> Content:
        """A document from its tokens and their loss mask, as ``encode_text`` or ``encode_messages`` made them: what they hold is all of it."""
        if self.start_token not in ids:
            return {"text": self.decode(ids)}
        starts, stops = np.flatnonzero(ids == self.start_token), np.flatnonzero(ids == self.stop_token)
        turns = ((*self.decode(ids[a + 1 : b]).split("\n", 1), mask[b]) for a, b in zip(starts, stops, strict=True))
        return {"messages": [turn_of(role, content, bool(learned)) for role, content, learned in turns]}

    def copy_to(self, folder: Path, as_it_was: bool = False) -> None:
        """Copy the files that transformers and vLLM need into an export folder, with the tokenizer's ``chat_template``, and name BOS in its
        config.json: the trainer, which writes that, knows no tokenizer.

        ``as_it_was``: with the template that the tokenizer was trained with, for an older export that is made again.
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
        if not as_it_was and template.read_text(encoding="utf-8") in OLDER_TEMPLATES:
            named = folder / "tokenizer_config.json"
            _write_json(
                named, json.loads(named.read_text(encoding="utf-8")) | {"chat_template": self.chat_template}, indent=1
            )
            template.write_text(self.chat_template, encoding="utf-8")

    def ids(self, text: str) -> list[int]:
        """Ids of a text, no special tokens."""
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
            answer = carries_loss(message)
            head, body = self._message(f"{role}\n", content)
            ids += [self.start_token, *head, *body, self.stop_token, *self._line_end]
            mask += [False] * (1 + len(head)) + [answer] * (len(body) + 1)
            mask += [False] * len(self._line_end)
        return ids, mask

    def _message(self, head: str, content: str) -> tuple[list[int], list[int]]:
        """Ids of role and content, as if encoded in one go: whoever renders the template to a string does that."""
        if not content[:1].isspace():  # then no piece spans the line end between them
            return self.ids(head), self.ids(content)
        encoded = self._inner.encode(head + content, add_special_tokens=False)
        cut = sum(start < len(head) for start, _ in encoded.offsets)
        return encoded.ids[:cut], encoded.ids[cut:]


def train(texts: Iterator[str], vocab_size: int, folder: Path) -> Tokenizer:
    """Train on ``texts`` and write the folder's files, each one whole or not at all (tokenizer.json last).

    The same texts give the same file. A small sample may give fewer than ``vocab_size`` tokens, never more.
    """
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated"),
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
        max_token_length=32,  # characters of byte-level text; longer ones are rulers of dashes and the like
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    write_files(inner.to_str(pretty=True), True, folder)
    return Tokenizer.load(folder)


def write_files(tokenizer: str, has_bos: bool, folder: Path) -> None:
    """The files that a tokenizer.json of this text is used with, each one whole or not at all, and itself last."""
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


def shows_calls(folder: Path) -> bool:
    """Does the template of a tokenizer's folder write tools, calls of them and reasoning as ingest does? One that is not there yet will."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8") in (CHAT_TEMPLATE, TEMPLATE_WITHOUT_BOS)
    except FileNotFoundError:
        return True
    except (OSError, UnicodeDecodeError):
        return False


def _shown(ids: list[int]) -> str:
    return f"[{', '.join(map(str, ids[:6]))}{', …' if len(ids) > 6 else ''}]"


def _write_json(path: Path, content: dict[str, Any], indent: int) -> None:
    path.write_text(json.dumps(content, indent=indent), encoding="utf-8")


def holds_special(text: str) -> bool:
    """Does the text spell a special token? Programs that match them in text encode it differently."""
    return any(token in text for token in SPECIAL)
