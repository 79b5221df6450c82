"""Hashes words and runs of words, for near-duplicate search and decontamination.

A word is a run of letters, digits and underscores in lower case. BLAKE2b hashes it to 64 bits. The hashes are the same in all versions. The
hash of a run of n words is a polynomial of the words' hashes, mixed (splitmix64).
"""

from __future__ import annotations

import hashlib
import re

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

_WORD = re.compile(r"\w+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_WORDS_AT_MOST = 1_000_000  # a larger table of hashes is cleared


class _WordHashes(dict[str, int]):
    def __missing__(self, word: str) -> int:
        digest = hashlib.blake2b(word.lower().encode("utf-8", "surrogatepass"), digest_size=8).digest()
        if len(self) > _WORDS_AT_MOST:
            self.clear()
        value = self[word] = int.from_bytes(digest, "little")
        return value


_hashes = _WordHashes()


def hash_words(text: str) -> Hashes:
    """Return one hash for each word, shape [words]."""
    return np.fromiter(map(_hashes.__getitem__, _WORD.findall(text)), np.uint64)


def find_word_spans(text: str) -> list[tuple[int, int]]:
    """Return the place of each word of ``hash_words`` in the text, as [start, stop) in characters."""
    return [match.span() for match in _WORD.finditer(text)]


def hash_word_runs(words: Hashes, n: int) -> Hashes:
    """Return a hash for every run of ``n`` consecutive words, shape [max(words - n + 1, 0)]."""
    count = len(words) - n + 1
    if count <= 0:
        return words[:0]
    mixed = np.zeros(count, np.uint64)
    for place in range(n):
        mixed = mixed * _FACTOR + words[place : place + count]
    return mix_bits(mixed)


def mix_bits(values: Hashes) -> Hashes:
    """Mix the bits of hashes (the finaliser of splitmix64), so that the smallest hash is an unbiased sample."""
    values = values ^ (values >> np.uint64(31))
    values = values * _MIX
    return values ^ (values >> np.uint64(29))


def winnow_hashes(hashes: Hashes, window: int) -> Hashes:
    """Return the smallest hash of every window, each once: about 2 of every ``window + 1`` hashes.

    Two texts that share ``window`` consecutive hashes share a returned hash (Schleimer, Wilkerson, Aiken 2003).
    """
    if len(hashes) <= window:
        return hashes[[hashes.argmin()]] if len(hashes) else hashes
    windows = np.lib.stride_tricks.sliding_window_view(hashes, window)
    return np.unique(hashes[np.unique(windows.argmin(axis=1) + np.arange(len(windows)))])
