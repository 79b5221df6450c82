"""The held-out loss from which the weights of an average are chosen: bits per byte on the dev half, by domain and as one mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from factory.core.errors import InputError
from factory.evals.policy import EvalPolicy
from factory.evals.reference_model import ReferenceModel
from factory.evals.suite import select_held_out_documents
from factory.evals.tasks import (
    EvalItem,
    ScoredText,
    compute_bits_per_byte_by_domain,
    encode_documents,
    measure_noise_floor,
    score_bits_per_byte,
)
from factory.evals.token_bytes import TokenBytes
from factory.gates.release.policy import ReleasePolicy
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.plant import Plant

ProgressCallback = Callable[[float], None]


@dataclass(frozen=True)
class HeldOutLossMeter:
    """Measures the held-out loss of an export as one number, a weighted mean over domains, or by domain."""

    texts: list[ScoredText]
    shares: dict[str, float]  # the weight of each domain in the mean; they sum to one
    policy: EvalPolicy

    def measure_loss(self, export: Path, advance: ProgressCallback = lambda _: None) -> float:
        """Bits per byte of an export. Raises: ExportError; InputError when the loss is not finite."""
        return self.compute_mean(self.measure_domains(ReferenceModel.load(export), export, advance)[0])

    def measure_loss_and_noise(self, export: Path, advance: ProgressCallback = lambda _: None) -> tuple[float, float]:
        """The loss, and how far a second measurement of the same weights may be from it (``measure_noise_floor``)."""
        model = ReferenceModel.load(export)
        bits, items = self.measure_domains(model, export, advance)
        return self.compute_mean(bits), self.compute_mean(self.measure_noise(model, items, advance))

    def measure_domains(
        self, model: ReferenceModel, export: Path, advance: ProgressCallback
    ) -> tuple[dict[str, float], list[EvalItem]]:
        """(bits per byte by domain, the items of ``measure_noise``). ``export``: for the message. Raises: InputError when a loss is not finite."""
        items = score_bits_per_byte(model, self.texts, self.policy, advance)
        bits = compute_bits_per_byte_by_domain(items)
        if not all(map(math.isfinite, bits.values())):
            raise InputError("training.loss_not_finite", "The held-out loss of {export} is not finite.", export=export)
        return bits, items

    def measure_noise(
        self, model: ReferenceModel, items: list[EvalItem], advance: ProgressCallback
    ) -> dict[str, float]:
        """By domain, how far a second measurement of the same weights may be (``measure_noise_floor``)."""
        return measure_noise_floor(model, self.texts, items, self.policy, advance)

    def compute_mean(self, by_domain: Mapping[str, float]) -> float:
        """The mean of numbers by domain, with the weights of the release policy's target."""
        return sum(share * by_domain[domain] for domain, share in self.shares.items())

    @property
    def document_counts(self) -> dict[str, int]:
        """The number of measured documents of each domain."""
        domains = sorted({text.document.domain for text in self.texts})
        return {domain: sum(text.document.domain == domain for text in self.texts) for domain in domains}


def load_held_out_loss_meter(plant: Plant, guards: bool = False) -> HeldOutLossMeter:
    """Return a ``HeldOutLossMeter`` over the held-out documents (dev half) of the domains in the release policy's target. ``guards``: of all domains,
    though only those of the target count for the mean.

    Raises: InputError when no document of the target is held out; ConfigError.
    """
    policy = EvalPolicy.load(plant.workspace.policy_path("evals.yaml"))
    weights = ReleasePolicy.load(plant.workspace.policy_path("gates/release.yaml")).target.weights
    tokenizer, token_bytes = Tokenizer.load(plant.workspace.tokenizer), TokenBytes.load(plant.workspace.tokenizer)
    dev = select_held_out_documents(plant.ledger, policy.documents_per_domain, sealed=False)
    weight_of = {d.domain: weights.get(d.domain, 0.0) if weights else 1.0 for d in dev}
    texts = encode_documents(dev, tokenizer, token_bytes, policy.document_bytes)
    shares = {
        domain: weight_of[domain]
        for domain in sorted({text.document.domain for text in texts})
        if weight_of[domain] > 0
    }
    if not shares:
        raise InputError(
            "training.no_held_out_documents",
            "No held-out document of the dev half has a domain that counts for the target in policies/gates/release.yaml. "
            "Ingest more documents.",
        )
    total = sum(shares.values())
    measured = [text for text in texts if guards or text.document.domain in shares]
    return HeldOutLossMeter(measured, {domain: weight / total for domain, weight in shares.items()}, policy)
