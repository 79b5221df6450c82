"""Byte bigram and trigram models, fitted on the candidate's training text and measured on the same held-out bytes.

A first release must beat them, because a network that does not beat counts of three bytes has learned nothing. Smoothing is interpolated Witten–Bell
(Chen & Goodman 1998, §2.6): p(c|h) = (n(hc) + T(h)·p'(c)) / (n(h) + T(h)). T(h) is the number of distinct bytes after h, and p' is the next shorter
model. The shortest model is add-one. Every distribution sums to one, and no byte has probability 0. Each domain has its own models. They are harder
to beat than models of all domains.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from factory.core.progress import ProgressTask
from factory.evals.suite import make_shuffling_sort_key
from factory.evals.tasks import ScoredText
from factory.evals.token_bytes import TokenBytes
from trainer.contract.data.token_shard import TokenShard

Array = npt.NDArray[Any]
NOTHING = 0  # the byte before a document's first byte


class ByteNgramModel:
    """Interpolated models of one, two and three bytes, from counts."""

    def __init__(self) -> None:
        self.trigrams = np.zeros(1 << 24, np.int32)

    def add_document(self, text: Array, counted_mask: Array) -> None:
        """Count the bytes [N] of a document that ``counted_mask`` [N] marks, each after its two previous bytes."""
        self.trigrams += np.bincount(_contexts(text)[counted_mask], minlength=1 << 24).astype(np.int32)

    def finish_counting(self) -> None:
        """Compute the shorter models from the counts. Call it after the last ``add_document``."""
        cube = self.trigrams.reshape(256, 256, 256)
        self.pairs = cube.sum(0, dtype=np.int64)
        singles = self.pairs.sum(0)
        self.single = (singles + 1) / (singles.sum() + 256)
        kinds, total = (self.pairs > 0).sum(1), self.pairs.sum(1)
        self.bigram = np.where(
            total[:, None] > 0,
            (self.pairs + kinds[:, None] * self.single) / np.maximum(total + kinds, 1)[:, None],
            self.single,
        )
        self.context_total = cube.sum(2, dtype=np.int64).ravel()
        self.context_kinds = (cube > 0).sum(2).ravel()

    def measure_bits(self, text: Array, counted_mask: Array) -> tuple[float, float]:
        """Return the bits of the counted bytes under the bigram model and under the trigram model."""
        code = _contexts(text)[counted_mask]
        bigram = self.bigram[(code >> 8) & 255, code & 255]
        total, kinds = self.context_total[code >> 8], self.context_kinds[code >> 8]
        trigram = np.where(total > 0, (self.trigrams[code] + kinds * bigram) / np.maximum(total + kinds, 1), bigram)
        return float(-np.log2(bigram).sum()), float(-np.log2(trigram).sum())


def measure_baselines(
    shards: Sequence[TokenShard],
    texts: Sequence[ScoredText],
    token_bytes: TokenBytes,
    bytes_per_domain: int,
    task: ProgressTask,
) -> dict[str, dict[str, float]]:
    """Return {domain: {"bigram", "trigram": bits per byte, "fitted_bytes"}} for every domain of ``texts``.

    A domain without training text has no baselines.
    """
    found = {}
    for domain in sorted({text.document.domain for text in texts}):
        model, fitted = ByteNgramModel(), 0
        for document, counted in _chunks(_training_text(shards, domain, token_bytes, bytes_per_domain)):
            model.add_document(document, counted)
            fitted += int(counted.sum())
        task.advance(1, domain)
        if not fitted:
            continue
        model.finish_counting()
        bits, measured = np.zeros(2), 0
        for text in texts:
            if text.document.domain == domain:
                held, token_of_byte = token_bytes.find_bytes_of_ids(text.tokens)
                bits += model.measure_bits(held, text.scored[token_of_byte])
                measured += text.bytes
        found[domain] = {"bigram": bits[0] / measured, "trigram": bits[1] / measured, "fitted_bytes": float(fitted)}
    return found


def hash_baseline_inputs(suite_sha256: str, shards: Sequence[TokenShard]) -> str:
    """Return a hash of the suite and the token shards, on which the baselines depend."""
    return hashlib.sha256(json.dumps([suite_sha256, sorted(shard.id for shard in shards)]).encode()).hexdigest()


def open_token_shards(root: Path, plan: dict[str, Any]) -> list[TokenShard]:
    """Return the token shards of a data plan. Relative paths start in ``root``, the workspace."""
    return [TokenShard(root / entry["path"], entry.get("moved")) for entry in plan["token_shards"]]


def _training_text(
    shards: Sequence[TokenShard], domain: str, token_bytes: TokenBytes, limit: int
) -> Iterator[tuple[Array, Array]]:
    """Yield (bytes, supervised bytes) of a domain's training documents, ordered by hash, until ``limit`` bytes are supervised."""
    listed = []
    for shard in shards:
        table = shard.documents
        columns = [table.column(name).to_pylist() for name in ("domain", "key", "start", "length")]
        listed += [
            (make_shuffling_sort_key("baseline", key), shard, start, length)
            for where, key, start, length in zip(*columns, strict=True)
            if where == domain
        ]
    listed.sort(key=lambda entry: entry[0])
    taken = 0
    for _, shard, start, length in listed:
        if taken >= limit:
            return
        text, token_of_byte = token_bytes.find_bytes_of_ids(shard.tokens[start : start + length].astype(np.int64))
        counted = shard.read_loss_mask(start, start + length)[token_of_byte]
        taken += int(counted.sum())
        yield text, counted


def _chunks(documents: Iterator[tuple[Array, Array]], size: int = 4 << 20) -> Iterator[tuple[Array, Array]]:
    """Join documents into chunks of about ``size`` bytes, with two ``NOTHING`` bytes between documents, because counting short texts is slow."""
    gap, uncounted = np.full(2, NOTHING, np.uint8), np.zeros(2, bool)
    texts: list[Array] = []
    masks: list[Array] = []
    held = 0
    for text, counted in documents:
        texts += [text, gap]
        masks += [counted, uncounted]
        held += len(text)
        if held >= size:
            yield np.concatenate(texts), np.concatenate(masks)
            texts, masks, held = [], [], 0
    if texts:
        yield np.concatenate(texts), np.concatenate(masks)


def _contexts(text: Array) -> Array:
    """Return each byte [N] with its two previous bytes, as a 24-bit number."""
    wide = np.concatenate((np.full(2, NOTHING, np.int64), text.astype(np.int64)))
    return (wide[:-2] << 16) | (wide[1:-1] << 8) | wide[2:]
