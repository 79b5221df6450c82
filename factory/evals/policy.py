"""``policies/evals.yaml``: how much is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from factory.core.policy_file import Count, Share, StrictPolicy, load_policy


class EvalPolicy(StrictPolicy):
    """Every key is optional. All counts are caps; the choice below a cap is by hash, so that all candidates get the same items."""

    documents_per_domain: Count = 60
    """Held-out documents of the sealed half scored in bits per byte, a domain."""
    dev_documents_per_domain: Count = 20
    """Held-out documents of the dev half that are scored beside them."""
    source_share: Share = 0.25
    """Of a domain's bytes that are scored, share from one source at most, but for its first document; fewer documents are scored where one source
    has most of the bytes."""
    document_bytes: Count = 2048
    """Bytes scored of one document."""
    window_overlap: Share = 0.25
    """Share of a window that is context only, so that no token but a document's first is predicted from nearly nothing."""
    cloze_items_per_domain: Count = 40
    """Multiple-choice questions of a domain: which text continues a held-out passage."""
    cloze_context_bytes: Count = 256
    """Bytes of the passage that are shown."""
    cloze_continuation_bytes: Count = 64
    """Bytes of each answer to choose from."""
    chat_samples: Count = 12
    """Held-out questions that the model answers."""
    chat_tokens: Count = 96
    """Longest greedy answer."""
    baseline_bytes_per_domain: Count = 4_000_000
    """Bytes of training text that the byte n-gram baselines are fitted on, a domain."""
    noise_documents_per_domain: Count = 20
    """Documents measured a second time under shifted windows (see evals/tasks.py, noise_floor)."""
    parity_documents: Count = 24
    """Texts and conversations whose token ids are compared between trainer, evaluator and server."""
    contamination_ngram: Count = 192
    """Tokens of a run in the contamination check: longer than what ingest's decontamination (runs of 44 words) may let through, so
    that a hit means that it failed. A shorter document is contaminated where a training document is equal to it, token for token."""
    contamination_overlap: Share = 0.6
    """A held-out document, scored or not, is contaminated when more of its n-grams than this stand in the training data."""
    probe_seconds: Count = 120
    """Time limit of the load-and-generate test; the machine may be busy, it takes about 10 s alone."""
    probe_memory_mib: Count = 6144
    """Memory limit of that test."""
    engine_seconds: Count = 120
    """Time limit of the same in the serving engine; it runs beside that test."""
    vllm_seconds: Count = 1800
    """Time limit of vLLM, which is asked too where ``make serve-env`` installed it; it takes minutes to start."""
    vllm: Literal["auto", "never"] = "auto"
    """never: only the embedded engine is asked, also where vLLM is installed."""

    @classmethod
    def load(cls, path: Path) -> EvalPolicy:
        return load_policy(cls, path)
