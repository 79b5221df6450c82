"""Real rows and files for tests of tracking, releases and reports: segments that ran, candidates, evaluations, verdicts."""

from __future__ import annotations

import json
import time
from pathlib import Path

from factory.core.exports import hash_export_folder
from factory.core.policy_file import hash_policy
from factory.core.workspace import Workspace
from factory.gates.release.evidence import ReleaseEvidence
from factory.gates.release.judge import judge
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.recorded_verdict import compute_evidence_sha256
from factory.ledger.ledger import (
    Ledger,
    candidates,
    data_plans,
    documents,
    eval_items,
    evaluations,
    record_event,
    releases,
    segments,
    shards,
    token_shards,
    verdicts,
)
from factory.ledger.rows import CandidateRow, SegmentRow, Subject
from factory.ledger.writing import record_verdict
from factory.show.mlflow.store import open_client
from kernels.contract.files import replace_non_finite

QUESTION, ANSWER = "What is <b>len</b>?", "<script>alert(1)</script> \x1b[31m \u202e \ud800"


def with_store(workspace: Workspace) -> Workspace:
    open_client(workspace)
    return workspace


def add_segment(workspace: Workspace, ledger: Ledger, kind: str = "anneal", parent: int | None = None) -> SegmentRow:
    with ledger.begin() as tx:
        number = len(tx.execute(segments.select()).all()) + 1
        folder = workspace.segments / f"{number:04d}-{kind}"
        folder.mkdir(parents=True)
        recipe = {"name": "demo", "model": {"d_model": 64, "layers": 2}, "phases": [0.5, 0.5], "precision": "fp32"}
        plan = {"token_shards": [{"id": "t" * 64, "path": "shards/t", "generation": 1}], "weights": {"code": 1.0}}
        if not tx.execute(data_plans.select().where(data_plans.c.id == "p" * 64)).first():
            tx.execute(data_plans.insert().values(id="p" * 64, plan=plan, created_at=time.time()))
        row = {
            "id": number, "kind": kind, "parent": parent, "generation": 1, "recipe": "demo", "recipe_json": recipe,
            "recipe_sha256": "r" * 64, "data_plan": "p" * 64, "code_commit": "c" * 40, "first_step": 0, "last_step": 100,
            "state": "done", "attempts": 1, "folder": ledger.to_stored_path(folder), "result": {"tokens": 10_000, "loss": 2.5},
            "created_at": 1.7e9 + number, "finished_at": 1.7e9 + number + 60,
        }  # fmt: skip
        tx.execute(segments.insert().values(row))
    return SegmentRow.get(ledger, number)


def write_metrics(path: Path, first: int, last: int) -> None:
    with open(path, "a") as file:
        for step in range(first, last):
            file.write(metrics_line(step))


def metrics_line(step: int) -> str:
    loss = 8 / (1 + step / 20)
    row = {"step": step, "kind": "trunk", "tokens": step * 512, "loss": loss, "loss/code": loss * 0.9}
    row |= {"loss/docs": loss * 1.1, "grad_norm": 1.0, "lr": 1e-3, "time": 1.7e9 + step}
    return json.dumps(row) + "\n"


def add_shard(ledger: Ledger, sha256: str = "s" * 64, name: str = "code-00.jsonl") -> None:
    counts = {"train": 90, "held_out": 5, "dropped": {"exact_duplicate": 3, "too_short": 2}, "pii": 4, "trimmed": 0}
    domains = {"code": {"documents": 90, "tokens": 9000, "supervised_tokens": 9000}}
    with ledger.begin() as tx:
        tx.execute(
            shards.insert().values(
                sha256=sha256,
                name=name,
                path=f"inbox/{name}",
                bytes=123456,
                state="ingested",
                rows=100,
                counts=counts,
                domains=domains,
                tokens=9000,
                ingested_at=1.7e9,
            )  # fmt: skip
        )
        tx.execute(
            token_shards.insert().values(
                id="t" * 64,
                shard=sha256,
                path="shards/t",
                tokenizer="k" * 64,
                documents=90,
                tokens=9000,
                domains=domains,
                created_at=1.7e9,
            )  # fmt: skip
        )


def add_document(ledger: Ledger, licence: str | None, key: str = f"{'s' * 16}:0") -> None:
    """One that every candidate was trained on."""
    values = {"key": key, "id": key, "shard": "s" * 64, "row": 0, "domain": "code", "fate": "train", "license": licence}
    with ledger.begin() as tx:
        tx.execute(documents.insert().values(**values, tokens=100, supervised_tokens=100, token_shard="t" * 64))


def add_candidate(workspace: Workspace, ledger: Ledger, export: Path | None = None) -> int:
    """A candidate with an export of its own (by default one that nothing can load) and an evaluation."""
    segment = add_segment(workspace, ledger)
    write_metrics(Path(segment.folder) / "metrics.jsonl", 0, 100)
    if export is None:
        export = workspace.exports / f"candidate-{segment.id}"
        export.mkdir()
        (export / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "id": segment.id}))
        (export / "model.safetensors").write_bytes(bytes([segment.id]) * 4096)
    summary = {
        "bpb": {"code": 2.1, "docs": 2.4},
        "bytes": {"code": 90_000, "docs": 40_000},
        "documents": {"code": 60, "docs": 40},
        "noise_floor": {"code": 0.001, "docs": 0.002},
        "cloze": {"share_right": 0.31, "items": 200, "chance": 0.25, "by_domain": {"code": 0.33, "docs": 0.29}},
        "baselines": {"code": {"bigram": 3.4, "trigram": 2.9}, "docs": {"bigram": 3.6, "trigram": 3.1}},
        "samples": [{"question": QUESTION, "answer": ANSWER, "ended": False, "parses": True, "domain": "chat"}],
        "parity": {
            "tokenizer": {"ok": True, "detail": "40 documents"},
            "smoke": {"ok": False, "detail": "<img src=x onerror=alert(2)>"},
        },
    }
    with ledger.begin() as tx:
        key = tx.execute(
            candidates.insert().values(
                segment=segment.id,
                checkpoint="k" * 64,
                export_path=str(export),
                export_sha256=hash_export_folder(export),
                created_at=1.7e9,
            )  # fmt: skip
        ).inserted_primary_key
        assert key
        evaluation = tx.execute(
            evaluations.insert().values(candidate=key[0], suite_sha256="e" * 64, summary=summary, created_at=1.7e9)
        ).inserted_primary_key
        assert evaluation
        tx.execute(
            eval_items.insert().values(
                evaluation=evaluation[0], task="bpb", item="a:1", domain="code", cluster="a", value=9.0, weight=12.0
            )
        )
    return int(key[0])


def add_judged(ledger: Ledger, candidate: int, evidence: ReleaseEvidence, against: int | None = None) -> int:
    """The judge's own verdict on some evidence, recorded as the gate does."""
    policy = ReleasePolicy()
    verdict = judge(policy, evidence)
    stored = replace_non_finite(evidence.to_json()) | {
        "suite_sha256": "u" * 64,
        "policy": policy.model_dump(mode="json"),
    }
    stored["sha256"] = compute_evidence_sha256(stored)
    with ledger.begin() as tx:
        return record_verdict(
            tx,
            "release",
            Subject("candidate", candidate),
            against=None if against is None else Subject("candidate", against),
            policy_sha256=hash_policy(policy),
            subject_sha256=CandidateRow.get(ledger, candidate).export_sha256,
            outcome=verdict.outcome,
            reasons=verdict.reasons,
            evidence=stored,
        )


def add_verdict(ledger: Ledger, candidate: int, outcome: str = "promote", against: int | None = None) -> int:
    row = ledger.select_first(candidates.select().where(candidates.c.id == candidate))
    assert row
    with ledger.begin() as tx:
        key = tx.execute(
            verdicts.insert().values(
                gate="release",
                subject=f"candidate:{candidate}",
                against=f"candidate:{against}" if against else None,
                policy_sha256="y" * 64,
                subject_sha256=row["export_sha256"],
                outcome=outcome,
                reasons=["bpb over all domains fell by 0.12 (95 % interval 0.10 … 0.14)"],
                evidence={"target": {"gain": 0.12, "low": 0.10, "high": 0.14}},
                created_at=1.7e9,
            )  # fmt: skip
        ).inserted_primary_key
    assert key
    return int(key[0])


def approval(workspace: Workspace, mode: str) -> None:
    path = workspace.root / "policies" / "gates" / "release.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"approval: {mode}\n")


def write_replicas(workspace: Workspace, keys: str) -> None:
    """The keys of ``replicas`` in the release policy."""
    policy = workspace.root / "policies" / "gates" / "release.yaml"
    policy.write_text(policy.read_text().partition("replicas:")[0] + f"replicas: {{{keys}}}\n")


def promote(ledger: Ledger, number: int, candidate: int, verdict: int) -> None:
    """A release of a candidate, as one that was published long ago."""
    with ledger.begin() as tx:
        tx.execute(
            releases.insert().values(
                number=number, candidate=candidate, verdict=verdict, state="published", created_at=float(number)
            )
        )
        record_event(tx, "promoted", f"release:{number}")
