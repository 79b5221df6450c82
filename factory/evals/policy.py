"""``policies/evals.yaml``: how much each evaluation measures."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from factory.core.policy_file import Count, Share, StrictPolicy, load_policy


class EvalPolicy(StrictPolicy):
    """Every key is optional. Counts are limits. A hash decides which documents are used, so all candidates get the same items."""

    documents_per_domain: Count = 60
    """Held-out documents of the sealed half that are scored in each domain."""
    dev_documents_per_domain: Count = 20
    """Held-out documents of the dev half that are scored in each domain."""
    source_share: Share = 0.25
    """The largest share of a domain's scored bytes from one source. Each source gives at least one document."""
    document_bytes: Count = 2048
    """Bytes that are scored in each document."""
    window_overlap: Share = 0.25
    """The share of a window that is only context, so that every later token is predicted from enough text."""
    cloze_items_per_domain: Count = 40
    """Multiple-choice questions in each domain: which text continues a held-out passage?"""
    cloze_context_bytes: Count = 256
    """Bytes of the passage before a cloze question."""
    cloze_continuation_bytes: Count = 64
    """Bytes of each choice of a cloze question."""
    chat_samples: Count = 12
    """Held-out questions that the model answers."""
    chat_tokens: Count = 96
    """The most tokens of an answer."""
    baseline_bytes_per_domain: Count = 4_000_000
    """Bytes of training text in each domain for fitting the byte n-gram baselines."""
    noise_documents_per_domain: Count = 20
    """Documents in each domain that are measured a second time with shifted windows (``noise_floor`` in evals/tasks.py)."""
    parity_documents: Count = 24
    """Texts and conversations whose token ids are compared between trainer, evaluator and server."""
    contamination_ngram: Count = 192
    """Tokens of an n-gram in the contamination check. It is longer than the texts that ingest's decontamination (44 words) may miss, so a match
    means that decontamination failed. A shorter document is contaminated if a training document has exactly its tokens."""
    contamination_overlap: Share = 0.6
    """The largest share of a held-out document's n-grams that may be in the training data."""
    probe_seconds: Count = 120
    """Time limit of the load-and-generate test. On an idle machine it takes about 10 s."""
    probe_memory_mib: Count = 6144
    """Memory limit of the load-and-generate test."""
    engine_seconds: Count = 120
    """Time limit of the tests of the serving engine, which runs at the same time."""
    vllm_seconds: Count = 1800
    """Time limit of the tests of vLLM, if ``make serve-env`` installed it. vLLM takes minutes to start."""
    vllm: Literal["auto", "never"] = "auto"
    """auto: test vLLM too if it is installed; never: test only the embedded engine."""

    @classmethod
    def load(cls, path: Path) -> EvalPolicy:
        return load_policy(cls, path)
