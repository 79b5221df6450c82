"""Measures a candidate on the current suite and records the evaluation in one transaction.

If the candidate was measured on this suite before, the recorded evaluation is returned. An invalid export or a loss that is not finite is a result:
the evaluation records the failed check for the gate. If the measurement is impossible (a changed export, too little memory), an error is raised and
nothing is recorded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from factory.core.errors import DamagedExportError, InputError
from factory.core.exports import hash_export_folder
from factory.core.faults import is_machine_fault_unrelated_to_files
from factory.evals.baselines import hash_baseline_inputs, measure_baselines, open_token_shards
from factory.evals.export_folder import ExportError
from factory.evals.parity import ParityCase, check_parity
from factory.evals.policy import EvalPolicy
from factory.evals.probes.checks import ProbeCheck, join_sentences
from factory.evals.reference_model import ReferenceModel
from factory.evals.suite import TASK_VERSIONS, Suite, build_suite
from factory.evals.tasks import (
    DEV,
    DISTRACTORS,
    ChatSample,
    EvalItem,
    ScoredText,
    build_cloze_items,
    compute_bits_per_byte_by_domain,
    encode_documents,
    generate_chat_samples,
    make_chat_eval_items,
    measure_noise_floor,
    score_bits_per_byte,
    score_cloze_items,
)
from factory.evals.token_bytes import TokenBytes
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger, eval_items, evaluations, record_event
from factory.ledger.plant import Plant
from factory.ledger.removals import replace_erased_token_shards
from factory.ledger.rows import IMPORT, CandidateRow, EvaluationRow, SegmentRow, Subject
from factory.ledger.writing import insert_row
from kernels.contract.files import replace_non_finite
from kernels.contract.message import CodedError, Message
from trainer.contract.data.token_shard import TokenShard
from trainer.contract.errors import TokenShardError


def load_current_suite(plant: Plant) -> Suite:
    """Return the suite on which candidates are compared now. Raises: InputError if the workspace has no tokenizer yet."""
    policy = EvalPolicy.load(plant.workspace.policy_path("evals.yaml"))
    return build_suite(plant.ledger, policy, Tokenizer.load(plant.workspace.tokenizer).sha256)


def evaluate_candidate(plant: Plant, candidate_id: int) -> int:
    """Measure a candidate on the current suite and return the evaluation's id. A repeated call with the same candidate and suite measures nothing.

    Raises: InputError for an unknown candidate or without held-out documents; DamagedExportError; NoMemoryError.
    """
    return evaluate_on_suite(plant, candidate_id, load_current_suite(plant))


def evaluate_on_suite(plant: Plant, candidate_id: int, suite: Suite, *, released: bool = False) -> int:
    """Measure a candidate on a given suite, as ``evaluate_candidate`` does. So two candidates can be measured on the same suite.

    ``released``: skip the parity checks. The candidate passed them before its release, and its export still has the same hash.
    """
    if known := find_evaluation(plant.ledger, candidate_id, suite):
        return known.id
    candidate = CandidateRow.get(plant.ledger, candidate_id)
    if not suite.documents:
        raise InputError(
            "evaluator.nothing_held_out",
            "The sealed half of the held-out documents is empty, so nothing can be measured. The dev half has "
            "{dev:,|document|documents}. Ingest documents of more groups ('group' in data.yaml), or make each "
            "document a group: 'factory data relabel --domain D --group document'",
            dev=len(suite.dev),
        )
    segment = SegmentRow.get(plant.ledger, candidate.segment)
    plan = plant.ledger.read("SELECT plan FROM data_plans WHERE id = :id", id=segment.data_plan)[0]["plan"]
    if (
        segment.kind == IMPORT
    ):  # it was trained elsewhere: the documents that are tokenised now serve the checks and the baselines
        listed = plant.ledger.read("SELECT id, path FROM token_shards WHERE tokens > 0 ORDER BY created_at, id")
        plan = plan | {"token_shards": [{"id": row["id"], "path": row["path"], "generation": 1} for row in listed]}
    policy = EvalPolicy.load(plant.workspace.policy_path("evals.yaml"))
    shards = open_token_shards(plant.workspace.root, replace_erased_token_shards(plant.ledger, plan))
    summary, items = _measure(plant, candidate, suite, shards, policy, released)
    return _write(plant.ledger, candidate_id, suite, summary, items)


def find_evaluation(ledger: Ledger, candidate_id: int, suite: Suite) -> EvaluationRow | None:
    """Return the recorded evaluation of a candidate on a suite, or None."""
    mine = "WHERE candidate = :candidate AND suite_sha256 = :suite"
    return EvaluationRow.find_first(ledger, mine, candidate=candidate_id, suite=suite.sha256)


def read_items_of_evaluation(ledger: Ledger, evaluation_id: int) -> list[EvalItem]:
    """Return the items of a recorded evaluation."""
    columns = [eval_items.c[name] for name in ("task", "item", "domain", "cluster", "value", "weight")]
    return [
        EvalItem(**row)
        for row in ledger.select_rows(sa.select(*columns).where(eval_items.c.evaluation == evaluation_id))
    ]


def refuse_damaged_export(candidate: CandidateRow) -> None:
    """Refuse a candidate whose export is missing or has another hash than recorded. Raises: DamagedExportError."""
    try:
        if hash_export_folder(Path(candidate.export_path)) != candidate.export_sha256:
            raise DamagedExportError(
                candidate.id,
                Message(
                    "evaluator.export_changed",
                    "the files in {export} have changed since their hash was recorded",
                    export=candidate.export_path,
                ),
            )
    except (InputError, OSError) as error:
        if is_machine_fault_unrelated_to_files(error):
            raise
        raise DamagedExportError(candidate.id, str(error)) from error


def _measure(
    plant: Plant,
    candidate: CandidateRow,
    suite: Suite,
    shards: Sequence[TokenShard],
    policy: EvalPolicy,
    released: bool,
) -> tuple[dict[str, Any], list[EvalItem]]:
    export = Path(candidate.export_path)
    tokenizer, token_bytes = Tokenizer.load(plant.workspace.tokenizer), TokenBytes.load(plant.workspace.tokenizer)
    summary: dict[str, Any] = {
        "export_sha256": candidate.export_sha256,
        "tokenizer_sha256": tokenizer.sha256,
        "task_versions": TASK_VERSIONS,
        "documents": {domain: len(suite.list_documents_of_domain(domain)) for domain in suite.domains},
    }
    refuse_damaged_export(candidate)
    try:
        model = ReferenceModel.load(export)
        if model.spec.vocab_size < tokenizer.vocab_size:
            raise ExportError(
                "evaluator.small_vocabulary", "{export}: the model's vocabulary has {model:,} tokens, fewer than the tokenizer's {tokenizer:,}",
                export=export, model=model.spec.vocab_size, tokenizer=tokenizer.vocab_size,
            )  # fmt: skip
    except ExportError as error:
        return summary | _parity_summary([ProbeCheck("export", False, _shortened(error))]), []
    encode = lambda documents: encode_documents(documents, tokenizer, token_bytes, policy.document_bytes)
    texts, dev_texts = encode(suite.documents), encode(suite.dev)
    cloze = build_cloze_items(suite, tokenizer, policy)
    total = len(texts) + len(cloze)
    with plant.progress.task(f"evaluating candidate {candidate.id}", None) as task:
        bpb_items = score_bits_per_byte(model, texts, policy, lambda n: task.advance(n, "bits per byte"))
        dev = score_bits_per_byte(model, dev_texts, policy, lambda n: task.advance(n, "bits per byte, dev half"))
        dev_items = [replace(item, task=DEV) for item in dev]
        noise = measure_noise_floor(
            model, texts, bpb_items, policy, lambda n: task.advance(n, "bits per byte, shifted")
        )
        cloze_items = score_cloze_items(model, cloze, lambda n: task.advance(n, "cloze"))
        samples = generate_chat_samples(model, suite, tokenizer, policy)
        task.advance(len(samples), "chat samples")
        summary |= _baselines(plant.ledger, suite, shards, texts, token_bytes, policy, task)
        checks = [
            ProbeCheck(
                "export",
                True,
                Message(
                    "evaluator.export_valid", "All tensors of {layers:,} layers of width {width:,} are present, finite and of the right shape",
                    layers=model.spec.layers, width=model.spec.d_model,
                ),
            )
        ]  # fmt: skip
        if problem := _not_finite([*bpb_items, *dev_items], cloze_items, noise):
            return summary | _parity_summary([*checks, ProbeCheck("finite_loss", False, problem)]), []
        all_finite = Message(
            "evaluator.all_finite", "The losses of {documents:,} held-out documents and {items:,} items are finite",
            documents=len(bpb_items), items=total,
        )  # fmt: skip
        checks.append(ProbeCheck("finite_loss", True, all_finite))
        try:
            if not released:
                checks += check_parity(
                    ParityCase(
                        candidate,
                        tokenizer,
                        plant.workspace.tokenizer,
                        token_bytes,
                        model,
                        suite,
                        [*texts, *dev_texts],
                        shards,
                        plant.ledger,
                        policy,
                    )
                )
        except (TokenShardError, OSError) as error:
            if is_machine_fault_unrelated_to_files(error):
                raise
            unreadable = Message(
                "evaluator.unreadable_shard", "A token shard cannot be read: {reason}", reason=str(error)
            )
            checks.append(ProbeCheck("trainer_tokens", False, unreadable))
        task.advance(len(checks), "parity")
    summary |= _results(bpb_items, noise, cloze_items, samples) | _parity_summary(checks)
    summary["dev"] = {
        "bpb": compute_bits_per_byte_by_domain(dev_items),
        "documents": {d: len([i for i in dev_items if i.domain == d]) for d in suite.domains},
    }
    return summary, [*bpb_items, *dev_items, *cloze_items, *make_chat_eval_items(samples)]


def _shortened(error: CodedError) -> Message:
    return Message.from_parts(error.code, str(error)[:500], error.data)


def _not_finite(documents: list[EvalItem], cloze: list[EvalItem], noise: dict[str, float]) -> Message | None:
    """Return a message about the items whose loss is not finite, and what to do; None if all losses are finite."""
    broken = [[item for item in items if not math.isfinite(item.value)] for items in (documents, cloze)]
    problems = [
        Message(
            "evaluator.items_not_finite", "The loss of {count:,} of {items:,} {kind} is not finite. First: {first}",
            count=len(found), items=len(items), kind=kind, first=found[0].item,
        )
        for kind, items, found in zip(("held-out documents", "cloze items"), (documents, cloze), broken, strict=True)
        if found
    ]  # fmt: skip
    shifted = sorted(domain for domain, value in noise.items() if not math.isfinite(value))
    if shifted and not problems:
        problems = [
            Message(
                "evaluator.shifted_not_finite",
                "The loss is not finite when the windows over the documents are shifted. Domains: {domains}",
                domains=shifted,
            )
        ]
    if not problems:
        return None
    return join_sentences(
        [
            *problems,
            Message(
                "evaluator.earlier_checkpoint",
                "The model's weights overflow or hold NaN. Continue the training from an earlier checkpoint",
            ),
        ]
    )


def _results(
    bpb_items: list[EvalItem], noise: dict[str, float], cloze_items: list[EvalItem], samples: list[ChatSample]
) -> dict[str, Any]:
    right: dict[str, list[float]] = {}
    for item in cloze_items:
        right.setdefault(item.domain, []).append(item.value)
    parsed = [sample.parses for sample in samples if sample.parses is not None]
    every = [value for values in right.values() for value in values]
    return {
        "bpb": compute_bits_per_byte_by_domain(bpb_items),
        "noise_floor": noise,
        "bytes": {
            domain: sum(i.weight for i in bpb_items if i.domain == domain) for domain in {i.domain for i in bpb_items}
        },
        "cloze": {
            "share_right": sum(every) / len(every) if every else None,
            "items": len(every),
            "chance": 1 / (1 + DISTRACTORS),
            "by_domain": {domain: sum(values) / len(values) for domain, values in sorted(right.items())},
        },
        "chat": {
            "answers": len(samples),
            "with_code": len(parsed),
            "parse": sum(parsed),
            "ended": sum(sample.ended for sample in samples),
        },
        "samples": [asdict(sample) for sample in samples],
    }


def _baselines(
    ledger: Ledger,
    suite: Suite,
    shards: Sequence[TokenShard],
    texts: list[ScoredText],
    token_bytes: TokenBytes,
    policy: EvalPolicy,
    task: Any,
) -> dict[str, Any]:
    """Return bits per byte of the byte n-gram models. They are read from an earlier evaluation on the same suite and data, if there is one."""
    key = hash_baseline_inputs(suite.sha256, shards)
    for row in ledger.select_rows(sa.select(evaluations.c.summary).where(evaluations.c.suite_sha256 == suite.sha256)):
        if row["summary"].get("baselines_key") == key:
            return {"baselines_key": key, "baselines": row["summary"]["baselines"]}
    try:
        return {
            "baselines_key": key,
            "baselines": measure_baselines(shards, texts, token_bytes, policy.baseline_bytes_per_domain, task),
        }
    except (TokenShardError, OSError) as error:
        if is_machine_fault_unrelated_to_files(error):
            raise
        return {}  # the gate holds without baselines; parity's check names the shard


def _parity_summary(checks: list[ProbeCheck]) -> dict[str, Any]:
    return {"parity": {check.name: {"ok": check.ok, "detail": check.detail} for check in checks}}


def _write(ledger: Ledger, candidate_id: int, suite: Suite, summary: dict[str, Any], items: list[EvalItem]) -> int:
    with ledger.begin() as tx:
        mine = (evaluations.c.candidate == candidate_id) & (evaluations.c.suite_sha256 == suite.sha256)
        known = tx.execute(sa.select(evaluations.c.id).where(mine)).scalar()
        if known is not None:  # another process was faster; its measurement stands
            return int(known)
        values = {"candidate": candidate_id, "suite_sha256": suite.sha256, "summary": replace_non_finite(summary)}
        number = insert_row(tx, evaluations, **values, created_at=time.time())
        if items:
            tx.execute(eval_items.insert(), [asdict(item) | {"evaluation": number} for item in items])
        detail = {"evaluation": number, "suite": suite.sha256[:16], "bpb": summary.get("bpb")}
        record_event(tx, "evaluated", Subject("candidate", candidate_id), detail)
    return number
