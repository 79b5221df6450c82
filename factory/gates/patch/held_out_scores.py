"""Scores untrusted weights on held-out documents of the dev half. The model code is the judge's own, not the candidate's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from factory.core.errors import InputError
from factory.evals.policy import EvalPolicy
from factory.evals.reference_model import ReferenceModel
from factory.evals.suite import select_held_out_documents
from factory.evals.tasks import (
    EvalItem,
    ScoredText,
    compute_bits_per_byte_by_domain,
    encode_documents,
    score_bits_per_byte,
)
from factory.evals.token_bytes import TokenBytes
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.plant import Plant
from models.tensors import list_tensor_shapes
from trainer.contract.checkpoint.format import Tensors
from trainer.contract.recipe import Recipe


def read_held_out_texts(
    documents_per_domain: int, document_bytes: int, plant: Plant
) -> tuple[list[ScoredText], EvalPolicy]:
    """Return at most ``documents_per_domain`` documents of the dev half, each cut to ``document_bytes``, and the policy for scoring.

    Without a tokenizer, there are no documents.
    """
    policy = EvalPolicy.load(plant.workspace.policy_path("evals.yaml"))
    try:
        tokenizer, token_bytes = Tokenizer.load(plant.workspace.tokenizer), TokenBytes.load(plant.workspace.tokenizer)
    except InputError:
        return [], policy
    dev = select_held_out_documents(plant.ledger, documents_per_domain, sealed=False)
    return encode_documents(dev, tokenizer, token_bytes, document_bytes), policy


def make_reference_model(weights: Tensors, recipe: dict[str, Any]) -> ReferenceModel:
    """Return the judge's own model with these weights. ``weights``: the trainer's name → tensor."""
    spec = Recipe.parse(recipe).model
    return ReferenceModel(spec, {name: weights[name] for name in list_tensor_shapes(spec)})


def score_weights(
    weights: Tensors, recipe: dict[str, Any], texts: Sequence[ScoredText], policy: EvalPolicy
) -> list[EvalItem]:
    """Return one item per document. Its value is the document's loss in nats, its weight is the number of bytes."""
    return score_bits_per_byte(make_reference_model(weights, recipe), texts, policy, lambda amount: None)


def measure_bits_per_byte(
    weights: Tensors, recipe: dict[str, Any], texts: Sequence[ScoredText], policy: EvalPolicy
) -> dict[str, float]:
    """Return domain → bits per byte."""
    return compute_bits_per_byte_by_domain(score_weights(weights, recipe, texts, policy))


def compute_gains_by_document(ours: Sequence[EvalItem], theirs: Sequence[EvalItem]) -> dict[str, list[float]]:
    """Return domain → the gains of ``ours`` over ``theirs`` in bits per byte, one for each source document. Both score the same documents."""
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.item, mine.weight) == (other.item, other.weight)
        pair = sums[mine.domain, mine.cluster]
        pair[0] += (other.value - mine.value) / math.log(2)
        pair[1] += mine.weight
    found: dict[str, list[float]] = defaultdict(list)
    for (domain, _), (bits, size) in sorted(sums.items()):
        if size:
            found[domain].append(bits / size)
    return dict(found)
