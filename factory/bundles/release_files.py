"""Reads from the ledger the contents of a release's bundle: policy, evidence, items, verdict, licences and anomalies.

None of them contains text of a held-out document.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from factory.bundles.files import layout
from factory.bundles.shards import list_shard_rows, read_token_shards_of_lineage
from factory.core.errors import InputError
from factory.core.policy_file import hash_policy
from factory.data.synthetic import count_synthetic_documents
from factory.evals.evaluator import read_items_of_evaluation
from factory.evals.policy import EvalPolicy
from factory.evals.suite import hash_suite, make_held_out_document_identity, read_held_out_documents
from factory.evals.tasks import DEV, EvalItem
from factory.gates.release.held_out_gaps import TASK
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.trained_licences import (
    NONE,
    compute_unreleasable_shares,
    count_tokens_by_licence,
    find_masked_documents,
)
from factory.ingest.document import read_author_model
from factory.ingest.rules.policy import DataPolicy
from factory.ledger.anomalies import list_anomalies
from factory.ledger.decisions import find_override
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import IMPORT, EvaluationRow, ReleaseRow, SegmentRow, VerdictRow
from kernels.contract.strict import parse

Files = dict[str, Any]  # path → a text, a JSON object, or the rows of JSON Lines
NOT_TOLD = (
    "samples",
    "seconds",
    "baselines_key",
)  # keys of a summary that are left out; samples hold held-out questions
VERDICT_COLUMNS = " ".join(("outcome", "reasons", "against", "policy_sha256", "subject", "subject_sha256"))


def read_release_files(plant: Plant, release: ReleaseRow, licence: str, with_documents: bool) -> Files:
    """Return the contents of a release's bundle, by path. Raises: InputError if licences, policy or evidence do not allow a bundle."""
    verdict = VerdictRow.get(plant.ledger, release.verdict)
    evidence = verdict.read_evidence(plant.ledger)
    if verdict.gate == IMPORT:
        raise InputError(
            "release_files.imported",
            "No bundle was made of release {release}, because it is the imported model, which this factory neither trained nor judged.",
            release=release.number,
        )
    evaluated = evidence.get("evaluations") or {}
    if not isinstance(evaluated.get(layout.CANDIDATE), int):
        raise InputError(
            "release_files.no_evaluations",
            "No bundle was made of release {release}, because verdict {verdict} does not name the evaluations that "
            "it judged",
            release=release.number, verdict=verdict.id,
        )  # fmt: skip
    policy = _policy(verdict, evidence)
    licences = _licences(plant, release, policy, licence)
    summaries, items = {}, []
    for who, number in evaluated.items():
        if number is not None:
            summary = EvaluationRow.get(plant.ledger, number).summary
            summaries[who] = {key: value for key, value in summary.items() if key not in NOT_TOLD}
            found = read_items_of_evaluation(plant.ledger, number)
            items += [{"of": who, **vars(item)} for item in found]
            if who == layout.CANDIDATE:
                held = _held_out(plant, found, summary, evidence.get("suite_sha256"))
    rules = DataPolicy.load(plant.workspace.policy_path("data.yaml")).licences
    of_tasks = _task_items(plant.ledger, evidence)
    return ({layout.TASK_ITEMS: of_tasks} if of_tasks else {}) | {
        layout.POLICY: policy.model_dump_json(),
        layout.EVIDENCE: evidence,
        layout.VERDICT: _verdict(plant.ledger, release, verdict),
        layout.ITEMS: items,
        layout.MEASUREMENTS: summaries,
        layout.HELD_OUT: held,
        layout.LICENCES: licences,
        layout.ANOMALIES: _anomalies(plant.ledger, release.segment),
        layout.SHARDS: list_shard_rows(plant.ledger, release.segment, rules, with_documents),
    }


def _task_items(ledger: Ledger, evidence: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the items of the judged tasks. The key ``cost`` of an item is true if a lower value is better."""
    found = []
    for task, sides in ((evidence.get("tasks") or {}).get("evaluations") or {}).items():
        for who, number in zip((layout.CANDIDATE, layout.CHAMPION), sides, strict=True):
            if number is not None:
                costs = EvaluationRow.get(ledger, number).summary.get("costs", ())
                about = {"of": who, "measured_in": task}
                found += [
                    about | {"cost": item.task in costs} | vars(item)
                    for item in read_items_of_evaluation(ledger, number)
                ]
    return found


def _policy(verdict: VerdictRow, evidence: dict[str, Any]) -> ReleasePolicy:
    """Return the policy that was recorded with the verdict. Raises: InputError if it was not recorded."""
    policy = parse(ReleasePolicy, evidence.get("policy") or {}, "its policy", InputError)
    if hash_policy(policy) != verdict.policy_sha256:
        raise InputError(
            "release_files.no_policy",
            "No bundle was made, because the policy of verdict {verdict} (sha256 {policy_sha256:.12}…) was not recorded. "
            "Make a bundle of a later release",
            verdict=verdict.id, policy_sha256=verdict.policy_sha256,
        )  # fmt: skip
    return policy


def _licences(plant: Plant, release: ReleaseRow, policy: ReleasePolicy, licence: str) -> dict[str, Any]:
    rules = DataPolicy.load(plant.workspace.policy_path("data.yaml")).licences
    tokens = count_tokens_by_licence(plant.ledger, release.segment, rules)
    other = compute_unreleasable_shares(rules, tokens)
    if not any(tokens.values()):
        raise InputError(
            "release_files.unknown_licences",
            "No bundle was made of release {release}, because the licences of its training data are not known",
            release=release.number,
        )
    if sum(other.values()) > policy.not_releasable_max:
        raise InputError(
            "release_files.not_releasable",
            "No bundle was made of release {release}, because {share:.1%} of its supervised tokens have licences that do "
            "not allow a release: {named}. At most {limit:.1%} of the tokens may have such licences. The rules for "
            "licences are in data.yaml",
            release=release.number,
            share=sum(other.values()),
            limit=policy.not_releasable_max,
            named=[f"{name} ({share:.0%})" for name, share in list(other.items())[:5]],
        )
    written = count_synthetic_documents(plant.ledger, read_token_shards_of_lineage(plant.ledger, release.segment))
    synthetic = Counter({one.maker: one.supervised_tokens for one in written})
    for row in find_masked_documents(plant.ledger, release.segment).values():
        if maker := read_author_model(row["detail"]):
            synthetic[maker] -= row["supervised_tokens"]
    allows = {name or NONE: rules.find_licence(name).release for name in tokens}
    return {
        "model": licence,
        "supervised_tokens": {name or NONE: count for name, count in sorted(tokens.items())},
        "release_allowed": allows,
        "not_releasable": other,
        "synthetic": dict(+synthetic),
    }


def _verdict(ledger: Ledger, release: ReleaseRow, verdict: VerdictRow) -> dict[str, Any]:
    """Return the content of verdict.json. Its key ``judge`` names the judge's version; verdicts of older factories lack the key."""
    told = verdict.select_fields(VERDICT_COLUMNS)
    sql = "SELECT detail FROM events WHERE kind = 'judged' AND subject = :subject ORDER BY id DESC"
    events = (row["detail"] or {} for row in ledger.read(sql, subject=verdict.subject))
    judge = next((event.get("judge") for event in events if event.get("verdict") == verdict.id), None)
    if judge is not None:
        told["judge"] = judge
    if over := find_override(ledger, verdict):
        told["override"] = over
    return {
        "release": release.number,
        "candidate": release.candidate,
        **told,
        "approved_by": release.approved_by,
        "judged_at": verdict.created_at,
        "released_at": release.created_at,
    }


def _held_out(plant: Plant, items: Sequence[EvalItem], summary: dict[str, Any], suite: str | None) -> dict[str, Any]:
    """Return the hashes of the held-out documents and, if the suite's hash can still be computed, the parts that the hash covers."""
    halves = {}
    for name, task in (("items", TASK), ("dev", DEV)):
        documents = read_held_out_documents(plant.ledger, sorted({item.item for item in items if item.task == task}))
        halves[name] = list(map(make_held_out_document_identity, documents))
    parts = {
        "tasks": summary.get("task_versions"),
        "policy": hash_policy(EvalPolicy.load(plant.workspace.policy_path("evals.yaml"))),
        "tokenizer": summary.get("tokenizer_sha256"),
    }
    whole = hash_suite(parts | halves) == suite
    return {"suite_sha256": suite, "identity": parts if whole else None, **halves}


def _anomalies(ledger: Ledger, segment: int) -> dict[str, Any]:
    """Return the anomalies of the segments that trained the model, and the quarantined documents of its training data."""
    lineage = {row.id for row in SegmentRow.read_lineage(ledger, segment)}
    used = read_token_shards_of_lineage(ledger, segment)
    sql = "SELECT key, id, token_shard, detail FROM documents WHERE fate = 'quarantined' ORDER BY key"
    taken = [row for row in ledger.read(sql) if row["token_shard"] in used]
    return {"anomalies": [row for row in list_anomalies(ledger) if row["segment"] in lineage], "quarantined": taken}
