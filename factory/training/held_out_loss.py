"""One number for the weights of a checkpoint: its loss on held-out documents, to weigh checkpoints by when they are averaged.

Measured by the judge's own model from an export, as all that the judge measures. Where enough is held out, on
documents *outside* the suite that candidates are judged on: what chose the weights must not judge them too. The number is
in bits per byte, the domains mixed as the release policy's target mixes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.evals.evaluator import current_suite
from factory.evals.policy import EvalPolicy
from factory.evals.reference_model import ReferenceModel
from factory.evals.suite import Suite, build_suite
from factory.evals.tasks import EvalItem, ScoredText, bits_per_byte, encode_suite, noise_floor, ratio_bits
from factory.evals.token_bytes import TokenBytes
from factory.gates.release.policy import ReleasePolicy
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger

Advance = Callable[[float], None]


@dataclass(frozen=True)
class Ruler:
    """Held-out documents, and how their losses become one number."""

    texts: list[ScoredText]
    shares: dict[str, float]  # of each domain in the number; they sum to one
    judged_too: bool  # are these the documents that the gate judges on?
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


def held_out_ruler(workspace: Workspace, ledger: Ledger) -> Ruler:
    """Documents outside the suite when every domain of the target has enough of them, else the suite's own.

    Raises: InputError when nothing is held out, or nothing of the domains that the target names; ConfigError.
    """
    policy = EvalPolicy.load(workspace.policy("evals.yaml"))
    gate = ReleasePolicy.load(workspace.policy("gates/release.yaml"))
    tokenizer, token_bytes = Tokenizer.load(workspace.tokenizer), TokenBytes.load(workspace.tokenizer)
    suite = current_suite(workspace, ledger)
    twice = policy.model_copy(update={"documents_per_domain": 2 * policy.documents_per_domain})
    judged = {document.key for document in suite.documents}
    rest = tuple(d for d in build_suite(ledger, twice, tokenizer.sha256).documents if d.key not in judged)
    wanted = {d: gate.target.weights.get(d, 0.0) if gate.target.weights else 1.0 for d in suite.domains}
    wanted = {domain: weight for domain, weight in wanted.items() if weight > 0}
    if not wanted:
        raise InputError(
            "nothing is held out of the domains that the release policy's target names: ingest more documents"
        )
    enough = all(sum(d.domain == domain for d in rest) >= gate.documents_min for domain in wanted)
    texts = encode_suite(Suite("", rest) if enough else suite, tokenizer, token_bytes, policy.document_bytes)
    texts = [text for text in texts if text.document.domain in wanted]
    found = {text.document.domain for text in texts}
    shares = {domain: weight for domain, weight in wanted.items() if domain in found}
    if not shares:
        raise InputError("the held-out documents hold nothing to score: ingest more documents")
    total = sum(shares.values())
    return Ruler(texts, {domain: weight / total for domain, weight in shares.items()}, not enough, policy)
