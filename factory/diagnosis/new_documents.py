"""Compares the documents of new shards with the documents before them. The comparison reads only the data and replays nothing.

In a shard with wrong domain labels, the documents have the token frequencies of another domain. In a chat shard with a lost or moved mask, other
tokens carry loss than in earlier chat shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from agents.loss_doctor.arms import NewShardsComparison
from trainer.contract.data.data_order import DataOrder
from trainer.contract.data.document_stream import DocumentStream, parse_stream_domain, parse_stream_generation

SAMPLE = 200  # documents of a stream that are read
TOKEN_BUCKETS = 1 << 17  # for counting tokens: more than the largest vocabulary that is trained here
COMMON = 0.02  # a token is common if loss begins after it in at least this share of documents


def compare_new_documents(order: DataOrder, keys: Mapping[str, tuple[str, ...]]) -> list[NewShardsComparison]:
    """Return a comparison for each stream of the newest generation that has documents in the window. The list is empty if there is one generation.

    ``keys`` maps each stream to the keys of the window's documents.
    """
    newest = max(map(parse_stream_generation, order.streams))
    before: dict[str, list[DocumentStream]] = {}
    for name, stream in order.streams.items():
        if parse_stream_generation(name) < newest:
            before.setdefault(stream.domain, []).append(stream)
    found = []
    for name, documents in sorted(keys.items()):
        domain = parse_stream_domain(name)
        if parse_stream_generation(name) < newest or domain not in before:
            continue
        new, old = _documents([order.streams[name]]), _documents(before[domain])
        others = {other: [tokens for tokens, _ in _documents(streams)] for other, streams in before.items()}
        share, share_before, alike = compare_loss_masks(new, old)
        reads_like = find_nearest_domain([tokens for tokens, _ in new], domain, others)
        found.append(NewShardsComparison(domain, documents, reads_like, share, share_before, alike))
    return found


Document = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]  # (tokens, whether each carries loss)


def _documents(streams: Sequence[DocumentStream]) -> list[Document]:
    """Return at most ``SAMPLE`` documents of streams of one domain, evenly spaced."""
    found = []
    for stream in streams:
        for index in np.linspace(0, stream.documents - 1, min(stream.documents, SAMPLE // len(streams) or 1)).astype(
            int
        ):
            shard, first, length = stream.find_document(int(index))
            tokens = np.asarray(shard.tokens[first : first + length]).astype(np.int64)
            found.append((tokens, np.asarray(shard.read_loss_mask(first, first + length), bool)))
    return found


def compare_loss_masks(new: Sequence[Document], old: Sequence[Document]) -> tuple[float, float, float]:
    """Return (share of tokens with loss in the new documents, the same in the old documents, share of new documents whose loss begins as usual).

    The loss of a document begins as usual if it begins after a token after which it commonly begins in the old documents.

    >>> chat = lambda marker, at: (np.arange(8) + marker * (np.arange(8) == at), np.arange(8) > at)
    >>> old = [chat(900, 3) for _ in range(9)]
    >>> compare_loss_masks([chat(900, 3)], old), compare_loss_masks([(chat(900, 3)[0], np.ones(8, bool))], old)
    ((0.5, 0.5, 1.0), (1.0, 0.5, 0.0))
    """
    share = lambda documents: (
        sum(float(mask.sum()) for _, mask in documents) / max(1, sum(len(mask) for _, mask in documents))
    )
    begins = Counter(_begins_after(*document) for document in old)
    common = {token for token, count in begins.items() if count >= COMMON * len(old)}
    if sum(begins[token] for token in common) < 0.5 * len(old):
        return share(new), share(old), 1.0  # in the old documents loss begins anywhere
    alike = sum(_begins_after(*document) in common for document in new) / max(1, len(new))
    return share(new), share(old), alike


def _begins_after(tokens: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_]) -> int:
    """Return the token before the first token with loss; -1 if the first token carries loss, -2 if no token does."""
    if not mask.any():
        return -2
    first = int(mask.argmax())
    return int(tokens[first - 1]) if first else -1


def find_nearest_domain(
    new: Sequence[npt.NDArray[np.int64]], domain: str, others: Mapping[str, Sequence[npt.NDArray[np.int64]]]
) -> str:
    """Return the domain whose documents are most similar to ``new``: ``domain``, unless another domain is nearer.

    The measure is the mean log-probability of the tokens of ``new``. A token's probability is its share among the tokens of half of a domain's
    documents.

    >>> low, high = (([np.arange(20) + start] * 4) for start in (0, 500))
    >>> find_nearest_domain(high, "code", {"code": low, "docs": high}), find_nearest_domain(low, "code", {"code": low, "docs": high})
    ('docs', 'code')
    """
    models = {name: _shares(documents[::2]) for name, documents in others.items()}
    own, best, nearest = models[domain], 0.5, domain
    for name, model in models.items():
        if name == domain:
            continue
        theirs, ours = _likelihood(others[name][1::2], model), _likelihood(others[domain][1::2], model)
        if theirs <= ours:
            continue  # the two domains cannot be distinguished
        share = (_likelihood(new, model) - ours) / (theirs - ours)
        if share > best and _likelihood(new, model) > _likelihood(new, own):
            best, nearest = share, name
    return nearest


def _shares(documents: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.float64]:
    """Return the logarithm of each token's share; tokens are counted modulo ``TOKEN_BUCKETS``."""
    counts = np.full(TOKEN_BUCKETS, 0.05)
    for tokens in documents:
        counts += np.bincount(tokens % TOKEN_BUCKETS, minlength=TOKEN_BUCKETS)
    found: npt.NDArray[np.float64] = np.log(counts / counts.sum())
    return found


def _likelihood(documents: Sequence[npt.NDArray[np.int64]], model: npt.NDArray[np.float64]) -> float:
    found = [model[tokens % TOKEN_BUCKETS] for tokens in documents]
    return float(np.concatenate(found).mean()) if found else 0.0
