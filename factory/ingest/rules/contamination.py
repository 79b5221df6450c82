"""Keeps training data and held-out documents free of shared runs of 13 words, whichever arrives first.

- A new training document that shares an n-gram with a held-out document loses the shared span and a margin on either
  side, as for GPT-3 (Brown et al. 2020, appendix C). If too much would be cut, the document is dropped. A chat is dropped.
- A new held-out document that shares an n-gram with a training document of an earlier shard is not held out; it becomes
  training data itself. (Within one shard the held-out document stays and the training document is trimmed.)

Held-out documents are indexed by all their n-grams, so the first direction finds every overlap. Training documents are
indexed by a winnowed sample (``word_hashes.winnow_hashes``), so the second direction finds every overlap of n + window - 1 = 44 words,
and shorter overlaps by chance (one 13-gram with probability 0.06). A document of 8–12 words is one n-gram. Shorter
documents are compared by the exact and near-duplicate rules only.

Phrases that many documents share (licence headers, boilerplate) are not a leak. When a held-out document is chosen, n-grams
that more than ``common`` documents have, and n-grams that overlap such n-grams, are left out of its index. The index of a document
never changes later, so later copies of an indexed n-gram are always found.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from factory.ingest.rules.word_hashes import Hashes, find_word_spans, hash_word_runs

SHORTEST_NGRAM = 8  # words of the shortest n-gram, as for GPT-3
MOST_PIECES = 10  # a document that would be cut into more pieces is dropped, as for GPT-3

Positions = npt.NDArray[np.int64]


def hash_ngrams(words: Hashes, n: int) -> Hashes:
    """Return the n-gram hashes of a document in order. A document of 8 to n - 1 words has a single hash."""
    if SHORTEST_NGRAM <= len(words) < n:
        return hash_word_runs(words, len(words))
    return hash_word_runs(words, n)


@dataclass(frozen=True)
class HeldOutNgrams:
    """An index of the n-gram hashes of held-out documents, sorted by hash, with the document that owns each."""

    hashes: Hashes  # [entries]
    owners: npt.NDArray[np.int64]  # [entries], each an index into ``keys``
    keys: list[str]

    @classmethod
    def build(cls, documents: Iterable[tuple[str, Hashes]]) -> HeldOutNgrams:
        keys: list[str] = []
        hashes: list[Hashes] = [np.zeros(0, np.uint64)]
        owners: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
        for key, grams in documents:
            owners.append(np.full(len(grams), len(keys), np.int64))
            hashes.append(grams)
            keys.append(key)
        joined = np.concatenate(hashes)
        order = np.argsort(joined, kind="stable")
        return cls(joined[order], np.concatenate(owners)[order], keys)

    def find_collisions(self, grams: Hashes) -> Positions:
        """Return the positions of the ``grams`` that are in the index, shape [collisions]."""
        if not len(self.hashes) or not len(grams):
            return np.zeros(0, np.int64)
        places = np.searchsorted(self.hashes, grams)
        places[places == len(self.hashes)] = 0
        return np.flatnonzero(self.hashes[places] == grams)

    def find_document_with_ngram(self, gram: int | np.uint64) -> str:
        """Return the key of the first held-out document that has the n-gram."""
        place = int(np.searchsorted(self.hashes, np.uint64(gram)))
        return self.keys[int(self.owners[place])]


def make_no_overlap_mask(positions: Positions, count: int, n: int) -> npt.NDArray[np.bool_]:
    """Return a mask, shape [count], of the n-grams that share no word with the n-grams at ``positions``."""
    steps = np.zeros(count + 1, np.int64)
    np.add.at(steps, np.maximum(positions - n + 1, 0), 1)
    np.add.at(steps, np.minimum(positions + n, count), -1)
    return np.cumsum(steps)[:count] == 0


def merge_spans(positions: Positions, n: int) -> list[tuple[int, int]]:
    """Return the n-grams at ``positions`` as spans of words [first, last + 1). Spans that touch are merged."""
    merged: list[tuple[int, int]] = []
    for start in positions.tolist():
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], start + n)
        else:
            merged.append((start, start + n))
    return merged


def cut_spans(text: str, collisions: list[tuple[int, int]], margin: int, max_trimmed: float) -> str | None:
    """Return the text without the colliding spans of words. Each span is extended by the margin, and then to whole lines if the lines are short.

    Returns None if more than ``max_trimmed`` of the text would be removed, or the text would be cut into too many pieces.
    """
    words = find_word_spans(text)
    cuts: list[tuple[int, int]] = []
    for first, stop in collisions:
        last = min(stop, len(words)) - 1
        start, end = max(words[first][0] - margin, 0), min(words[last][1] + margin, len(text))
        start, end = _line_start(text, start, margin), _line_end(text, end, margin)
        if cuts and start <= cuts[-1][1]:
            cuts[-1] = (cuts[-1][0], max(end, cuts[-1][1]))
        else:
            cuts.append((start, end))
    removed = sum(end - start for start, end in cuts)
    if removed > max_trimmed * len(text) or len(cuts) >= MOST_PIECES:
        return None
    pieces, at = [], 0
    for start, end in [*cuts, (len(text), len(text))]:
        pieces.append(text[at:start].strip("\n"))
        at = end
    return "\n\n".join(piece for piece in pieces if piece.strip()) or None


def _line_start(text: str, at: int, within: int) -> int:
    found = text.rfind("\n", max(at - within, 0), at)
    return found + 1 if found >= 0 else (0 if at <= within else at)


def _line_end(text: str, at: int, within: int) -> int:
    found = text.find("\n", at, at + within)
    return found if found >= 0 else (len(text) if at + within >= len(text) else at)
