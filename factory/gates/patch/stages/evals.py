"""Measures the trained weights of candidate and baseline on held-out documents. The judge's own model scores the weights.

The judge decides whether the candidate's weights are worse.

A separate file, because each stage of the gate is one file.
"""

from __future__ import annotations

from factory.gates.patch.held_out_scores import compute_gains_by_document, read_held_out_texts, score_weights
from factory.gates.patch.policy import PatchPolicy
from factory.gates.stage_interface import NOTHING_HELD_OUT, PatchCase, StageResult, make_passed_evidence
from kernels.contract.message import Message


def run(case: PatchCase[PatchPolicy]) -> StageResult:
    policy, start = case.policy.evals, case.start
    assert start is not None  # the training stage passed
    texts, eval_policy = read_held_out_texts(policy.documents, policy.document_bytes, case.plant)
    if not texts:
        return StageResult(NOTHING_HELD_OUT)
    candidate, baseline = (
        score_weights(run.weights, start.recipe, texts, eval_policy) for run in case.handed_on["training"]
    )
    found = compute_gains_by_document(candidate, baseline)
    means = {domain: sum(values) / len(values) for domain, values in found.items()}
    worst = min(means, key=means.__getitem__)
    reason = Message(
        "patch.scored",
        "{documents} held-out documents were scored. In the worst domain, {domain}, the change is {change:+.4f} bits per byte.",
        documents=len(texts), domain=worst, change=-means[worst],
    )  # fmt: skip
    return StageResult(make_passed_evidence(reason, gains=found))
