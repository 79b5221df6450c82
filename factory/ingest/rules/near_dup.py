"""Near-duplicates: MinHash signatures (rensa) of 5-word shingles, locality-sensitive bands, and a check of each pair.

120 permutations in 20 bands of 6 rows: a pair of Jaccard similarity 0.8 shares a band with probability 0.997, one of
0.5 with 0.27 (1 - (1 - s^6)^20); a shared band only nominates a pair, which counts when the estimate from the two
whole signatures (standard error 0.04 at 0.8) reaches the policy's threshold.

The first document stays; a later one that is similar to it is dropped and names it. Documents are compared only with
those that stayed, so a chain of small edits ends where its similarity to the first falls below the threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rensa import RMinHash

from factory.ingest.rules.words import Hashes, mix, runs

PERMUTATIONS, BANDS, ROWS, SHINGLE, SEED = 120, 20, 6, 5, 20200528
CANDIDATES = 50  # documents of one band that later ones are compared with: bounds the work a hostile shard can cause
# The parameters of the stored index; hashes made with others are not comparable.
INDEX = (
    f"rensa RMinHash v{RMinHash.ALGORITHM_VERSION} permutations {PERMUTATIONS} bands {BANDS} "
    f"shingle {SHINGLE} seed {SEED}"
)

Signatures = npt.NDArray[np.uint32]  # [documents, PERMUTATIONS]
Bands = npt.NDArray[np.uint64]  # [documents, BANDS]


def shingles(words: Hashes, content: bytes) -> Hashes:
    """The distinct 5-word shingles of a document; a shorter one is a single shingle, of its words or its content's hash."""
    if len(words) >= SHINGLE:
        return np.unique(runs(words, SHINGLE))
    if len(words):
        return runs(words, len(words))
    return np.frombuffer(content[:8], np.uint64)


def signatures(sets: Sequence[Hashes]) -> Signatures:
    if not sets:
        return np.zeros((0, PERMUTATIONS), np.uint32)
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in sets])]).astype(np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(np.concatenate(sets), offsets, PERMUTATIONS, SEED)
    return np.array(matrix.to_rows(), np.uint32)


def bands(signed: Signatures) -> Bands:
    """A hash for each band of each signature; the band's number is part of it."""
    mixed: Bands = np.tile(np.arange(BANDS, dtype=np.uint64), (len(signed), 1))
    grouped = signed.reshape(len(signed), BANDS, ROWS).astype(np.uint64)
    for row in range(ROWS):
        mixed = mix(mixed * np.uint64(0x9E3779B97F4A7C15) + grouped[:, :, row])
    return mixed


def similarity(a: npt.NDArray[np.uint32], b: npt.NDArray[np.uint32]) -> float:
    """Estimated Jaccard similarity of two signatures."""
    return float((a == b).mean())


class NearDuplicates:
    """The documents of one shard so far. ``known`` returns the stored documents that share band hashes."""

    def __init__(self, signed: Signatures, threshold: float, known: Callable[[Bands], Stored]) -> None:
        self._signed = signed
        self._threshold = threshold
        self._bands = bands(signed)
        # Only a band hash that occurs twice can match within the shard; the others need no entry.
        values, counts = np.unique(self._bands, return_counts=True)
        self._shared = set(values[counts > 1].tolist())
        self._here: dict[int, list[int]] = {}
        self.stored = known(values)

    def match(self, document: int) -> tuple[int | str, float] | None:
        """The kept document most like this one: its number in the shard or its stored key, and the similarity."""
        hashes = self._bands[document].tolist()
        here = {other for value in hashes for other in self._here.get(value, ())}
        stored = {key for value in hashes for key in self.stored.keys.get(value, ())}
        mine = self._signed[document]
        pairs: list[tuple[float, int | str]] = [
            (similarity(mine, self._signed[other]), other) for other in sorted(here)
        ]
        pairs += [(similarity(mine, self.stored.signatures[key]), key) for key in sorted(stored)]
        best = max(pairs, key=lambda pair: pair[0], default=None)
        return (best[1], best[0]) if best and best[0] >= self._threshold else None

    def keep(self, document: int) -> None:
        """Later documents are compared with this one."""
        for value in self._bands[document].tolist():
            if value in self._shared and len(kept := self._here.setdefault(value, [])) < CANDIDATES:
                kept.append(document)


@dataclass(frozen=True)
class Stored:
    """What the ledger knows about some band hashes: keys by hash, and the signatures of these keys."""

    keys: dict[int, list[str]]
    signatures: dict[str, npt.NDArray[np.uint32]]
