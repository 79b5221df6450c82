"""Finds near-duplicates with MinHash signatures (rensa) of 5-word shingles, locality-sensitive bands, and a check of each pair.

There are 120 permutations in 20 bands of 6 rows. A pair with Jaccard similarity 0.8 shares a band with probability 0.997,
a pair with 0.5 with probability 0.27 (1 - (1 - s^6)^20). A shared band only nominates a pair. The two documents are
near-duplicates if the estimate from their whole signatures (standard error 0.04 at 0.8) reaches the policy's threshold.

The first document is kept. A later similar document is dropped, and its row names the first document. Documents are compared only
with kept documents, so a chain of small edits ends where its similarity to the first falls below the threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rensa import RMinHash

from factory.ingest.rules.word_hashes import Hashes, hash_word_runs, mix_bits

PERMUTATIONS, BANDS, ROWS, SHINGLE, SEED = 120, 20, 6, 5, 20200528
CANDIDATES = 50  # a later document is compared with at most this many documents of one band; this limits the work that a hostile shard can cause
# The parameters of the stored index. Hashes that were made with different parameters cannot be compared.
INDEX = " ".join(
    (
        f"rensa RMinHash v{RMinHash.ALGORITHM_VERSION}",
        *(f"permutations {PERMUTATIONS}", f"bands {BANDS}", f"shingle {SHINGLE}", f"seed {SEED}"),
    )
)

Signatures = npt.NDArray[np.uint32]  # [documents, PERMUTATIONS]
Bands = npt.NDArray[np.uint64]  # [documents, BANDS]


def hash_shingles(words: Hashes, content: bytes) -> Hashes:
    """Return the distinct 5-word shingles of a document, hashed. A document of fewer words is one shingle: of its words, or of its content's hash."""
    if len(words) >= SHINGLE:
        return np.unique(hash_word_runs(words, SHINGLE))
    if len(words):
        return hash_word_runs(words, len(words))
    return np.frombuffer(content[:8], np.uint64)


def compute_signatures(shingle_sets: Sequence[Hashes]) -> Signatures:
    if not shingle_sets:
        return np.zeros((0, PERMUTATIONS), np.uint32)
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in shingle_sets])]).astype(np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(np.concatenate(shingle_sets), offsets, PERMUTATIONS, SEED)
    return np.array(matrix.to_rows(), np.uint32)


def hash_bands(signatures: Signatures) -> Bands:
    """Return a hash for each band of each signature. The number of the band is part of the hash."""
    mixed: Bands = np.tile(np.arange(BANDS, dtype=np.uint64), (len(signatures), 1))
    grouped = signatures.reshape(len(signatures), BANDS, ROWS).astype(np.uint64)
    for row in range(ROWS):
        mixed = mix_bits(mixed * np.uint64(0x9E3779B97F4A7C15) + grouped[:, :, row])
    return mixed


def estimate_similarity(a: npt.NDArray[np.uint32], b: npt.NDArray[np.uint32]) -> float:
    """Estimate the Jaccard similarity of two documents from their signatures."""
    return float((a == b).mean())


class NearDuplicateSearch:
    """Compares the documents of one shard with its kept documents so far and with stored ones. ``known`` returns the stored documents that share
    band hashes."""

    def __init__(self, signed: Signatures, threshold: float, known: Callable[[Bands], StoredBandMatches]) -> None:
        self._signed = signed
        self._threshold = threshold
        self._bands = hash_bands(signed)
        # Only a band hash that occurs twice can match within the shard; other hashes need no entry.
        values, counts = np.unique(self._bands, return_counts=True)
        self._shared = set(values[counts > 1].tolist())
        self._here: dict[int, list[int]] = {}
        self.stored = known(values)

    def find_most_similar(self, document: int) -> tuple[int | str, float] | None:
        """Return the most similar kept document (its number in the shard, or its stored key) and the similarity, or None if none is similar
        enough."""
        hashes = self._bands[document].tolist()
        here = {other for value in hashes for other in self._here.get(value, ())}
        stored = {key for value in hashes for key in self.stored.keys.get(value, ())}
        mine = self._signed[document]
        pairs: list[tuple[float, int | str]] = [
            (estimate_similarity(mine, self._signed[other]), other) for other in sorted(here)
        ]
        pairs += [(estimate_similarity(mine, self.stored.signatures[key]), key) for key in sorted(stored)]
        best = max(pairs, key=lambda pair: pair[0], default=None)
        return (best[1], best[0]) if best and best[0] >= self._threshold else None

    def add_document(self, document: int) -> None:
        """Add a kept document, so that later documents are compared with it."""
        for value in self._bands[document].tolist():
            if value in self._shared and len(kept := self._here.setdefault(value, [])) < CANDIDATES:
                kept.append(document)


@dataclass(frozen=True)
class StoredBandMatches:
    """The documents of earlier shards that have given band hashes: their keys by hash, and their signatures by key."""

    keys: dict[int, list[str]]
    signatures: dict[str, npt.NDArray[np.uint32]]
