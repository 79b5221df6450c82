"""Reads the UTF-8 bytes of each token id from tokenizer.json.

Bits per byte needs the number of bytes of each token, and the byte baselines need the bytes. The vocabulary of a byte-level BPE gives both
exactly, even for a token that is only a part of a character.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from factory.core.errors import InputError

Array = npt.NDArray[Any]


def _byte_of_letter() -> dict[str, int]:
    # GPT-2's printable alphabet of bytes (openai/gpt-2, src/encoder.py, bytes_to_unicode).
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


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
        """Read tokenizer.json in a tokenizer's folder. Raises: InputError unless the file is that of a byte-level BPE tokenizer."""
        path = tokenizer_folder / "tokenizer.json"
        letters = _byte_of_letter()
        try:
            data = json.loads(path.read_bytes())
            special = {int(token["id"]): str(token["content"]) for token in data["added_tokens"]}
            ids = {int(number): token for token, number in data["model"]["vocab"].items()} | dict.fromkeys(special, "")
            pieces = [
                bytes(letters[letter] for letter in ids[number]) if number not in special else b""
                for number in range(len(ids))
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                "token_bytes.other_tokenizer",
                "{file} is not the file of a byte-level BPE tokenizer: {reason}",
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
