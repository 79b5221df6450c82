"""One number for the weights of a checkpoint: its loss on held-out documents, to weigh checkpoints by when they are averaged.

Measured by the judge's own model from an export, as all that the judge measures, on the dev half of what is held out: what
chose the weights must not judge them too. The number is in bits per byte, the domains mixed as the release policy's target mixes them.

Apart because it measures with the judge's model, and averaging only weighs by what it is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from factory.core.errors import InputError
from factory.evals.policy import EvalPolicy
from factory.evals.reference_model import ReferenceModel
from factory.evals.suite import held_out_documents
from factory.evals.tasks import EvalItem, ScoredText, bits_per_byte, encode_documents, noise_floor, ratio_bits
from factory.evals.token_bytes import TokenBytes
from factory.gates.release.policy import ReleasePolicy
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.plant import Plant

Advance = Callable[[float], None]


@dataclass(frozen=True)
class Ruler:
    """Held-out documents, and how their losses become one number."""

    texts: list[ScoredText]
    shares: dict[str, float]  # of each domain in the number; they sum to one
    policy: EvalPolicy

    def loss(self, export: Path, advance: Advance = lambda _: None) -> float:
        """Bits per byte of an export. Raises: ExportError; InputError when the loss is not finite."""
        return self._measure(ReferenceModel.load(export), advance, export)[0]

    def loss_and_noise(self, export: Path, advance: Advance = lambda _: None) -> tuple[float, float]:
        """The loss, and how far a second measurement of the same weights may lie from it (``tasks.noise_floor``)."""
        model = ReferenceModel.load(export)
        loss, items = self._measure(model, advance, export)
        noise = noise_floor(model, self.texts, items, self.policy, advance)
        return loss, sum(share * noise[domain] for domain, share in self.shares.items())

    def _measure(self, model: ReferenceModel, advance: Advance, export: Path) -> tuple[float, list[EvalItem]]:
        items = bits_per_byte(model, self.texts, self.policy, advance)
        bits = ratio_bits(items)
        loss = sum(share * bits[domain] for domain, share in self.shares.items())
        if not math.isfinite(loss):
            raise InputError(f"{export}: its held-out loss is not finite")
        return loss, items

    @property
    def documents(self) -> dict[str, int]:
        """How many are measured, a domain."""
        return {domain: sum(text.document.domain == domain for text in self.texts) for domain in sorted(self.shares)}


def held_out_ruler(plant: Plant) -> Ruler:
    """The dev half's documents of the domains that the release policy's target names.

    Raises: InputError when nothing of them is held out; ConfigError.
    """
    policy = EvalPolicy.load(plant.workspace.policy("evals.yaml"))
    weights = ReleasePolicy.load(plant.workspace.policy("gates/release.yaml")).target.weights
    tokenizer, token_bytes = Tokenizer.load(plant.workspace.tokenizer), TokenBytes.load(plant.workspace.tokenizer)
    dev = held_out_documents(plant.ledger, policy.documents_per_domain, sealed=False)
    wanted = {d.domain: weights.get(d.domain, 0.0) if weights else 1.0 for d in dev}
    texts = encode_documents(dev, tokenizer, token_bytes, policy.document_bytes)
    texts = [text for text in texts if wanted[text.document.domain] > 0]
    shares = {domain: wanted[domain] for domain in sorted({text.document.domain for text in texts})}
    if not shares:
        raise InputError(
            "nothing in the dev half of what is held out is of the domains that the release policy's target names: ingest more documents"
        )
    total = sum(shares.values())
    return Ruler(texts, {domain: weight / total for domain, weight in shares.items()}, policy)
