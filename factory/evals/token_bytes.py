"""Reads the UTF-8 bytes of each token id from tokenizer.json.

Bits per byte needs the number of bytes of each token, and the byte baselines need the bytes. The vocabulary of a byte-level BPE gives both
exactly, even for a token that is only a part of a character. A vocabulary with blanks as ▁ (SentencePiece) or with ## for parts of words (WordPiece)
gives the bytes of the text that the tokenizer writes: a blank before the first word counts too, and what a normaliser dropped does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from factory.core.errors import InputError
from factory.ingest.tokenizing.description import read_tokenizer_folder, read_vocabulary

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
Array = npt.NDArray[Any]


def _byte_of_letter() -> dict[str, int]:
    # GPT-2's printable alphabet of bytes (openai/gpt-2, src/encoder.py, bytes_to_unicode).
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


def _find_spelling(library: Mapping[str, Any]) -> Callable[[str], bytes]:
    """Return how an entry of the vocabulary becomes bytes, from the decoder in tokenizer.json. The function raises KeyError for a letter that is not
    one of the decoder's."""
    decoder = library.get("decoder") or {}
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        letters = _byte_of_letter()
        return lambda token: bytes(letters[letter] for letter in token)
    if "WordPiece" in kinds:
        prefix = next(step for step in steps if step.get("type") == "WordPiece").get("prefix", "##")
        return lambda token: token.removeprefix(prefix).encode() if token.startswith(prefix) else f" {token}".encode()
    if "BPEDecoder" in kinds:
        suffix = next(step for step in steps if step.get("type") == "BPEDecoder").get("suffix", "</w>")
        return lambda token: (token.removesuffix(suffix) + " " * token.endswith(suffix)).encode()
    blanks = "Metaspace" in kinds or any(step.get("type") == "Replace" and step.get("content") == " " for step in steps)

    def spell(token: str) -> bytes:
        if "ByteFallback" in kinds and (byte := _FALLBACK.fullmatch(token)):
            return bytes([int(byte.group(1), 16)])
        return (token.replace("\u2581", " ") if blanks else token).encode()

    return spell


class TokenBytes:
    """The bytes of the tokens of a vocabulary of size V.

    ``lengths`` [V]: the number of bytes of each token; 0 for special tokens. ``special``: id → name of a special token.
    """

    def __init__(self, pieces: list[bytes], special: Mapping[int, str] | None = None) -> None:
        self.special = dict(special or {})
        self.lengths = np.array([len(piece) for piece in pieces], np.int64)
        self._flat = np.frombuffer(b"".join(pieces), np.uint8)
        self._starts = np.concatenate(([0], np.cumsum(self.lengths)[:-1]))

    @classmethod
    def load(cls, tokenizer_folder: Path) -> TokenBytes:
        """Read tokenizer.json in a tokenizer's folder. Raises: InputError for a file whose tokens have no known bytes."""
        path = tokenizer_folder / "tokenizer.json"
        try:
            found = read_tokenizer_folder(tokenizer_folder, path.read_bytes())
            special = {number: token for token, number in found.special.items()}
            to_bytes = _find_spelling(found.library)
            pieces = [b""] * (1 + max(found.ids.values()))
            for token, number in read_vocabulary(found.library["model"]).items():
                pieces[number] = to_bytes(token) if number not in special else b""
            for added in found.library["added_tokens"]:
                pieces[added["id"]] = b"" if added["id"] in special else added["content"].encode()
        except (OSError, ValueError, KeyError, TypeError, InputError) as error:
            raise InputError(
                "token_bytes.other_tokenizer",
                "{file} is not the file of a tokenizer whose tokens have known bytes: {reason}",
                file=path,
                reason=repr(error),
            ) from error
        return cls(pieces, special)

    def find_bytes_of_ids(self, ids: Array) -> tuple[Array, Array]:
        """Return the N bytes of a sequence of ids, and for each byte the index of its token in the sequence. Both arrays are [N]."""
        lengths = self.lengths[ids]
        token_of_byte = np.repeat(np.arange(len(ids)), lengths)
        within = np.arange(len(token_of_byte)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return self._flat[self._starts[ids][token_of_byte] + within], token_of_byte
