"""Reads the data of ``factory status`` and of the demo's last screen from the ledger, and formats it as lines."""

from __future__ import annotations

from typing import Any

from factory.core.time_formats import format_local_time
from factory.core.workspace import Workspace
from factory.ledger.anomalies import GAIN_ON_DEV_ONLY, list_anomalies
from factory.ledger.reader import LedgerReader
from factory.ledger.removals import describe_removed_training_data, list_releases_with_removed_data, list_removals
from factory.ledger.rows import (
    WITHOUT_STEPS,
    CandidateRow,
    EvaluationRow,
    ProposalRow,
    ReleaseRow,
    SegmentRow,
    Subject,
    VerdictRow,
    find_champion,
)
from kernels.contract.message import Message

SEGMENT = (
    "id kind parent",
    "generation recipe code_commit",
    "first_step last_step state",
    "attempts result",
    "created_at finished_at folder",
)
PROPOSAL_FIELDS = ("number agent target", "title hypothesis predicted_gain", "branch state report", "outcome reasons")


def read_status(workspace: Workspace) -> dict[str, Any]:
    """Return the data of ``factory status``, as JSON-ready values."""
    db = LedgerReader(workspace)
    shards = db.read(
        "SELECT name, sha256, state, reason, rows, counts, domains, tokens FROM shards ORDER BY ingested_at"
    )
    segments = [
        row.select_fields(*SEGMENT) | {"precision": row.recipe_json["precision"]} for row in SegmentRow.select(db)
    ]
    verdicts = [
        row.select_fields("id gate subject against", "outcome reasons created_at") for row in VerdictRow.select(db)
    ]
    releases = [
        row.select_fields("number candidate verdict", "state mlflow_version", "report created_at")
        for row in ReleaseRow.select(db)
    ]
    candidates = []
    evaluations = {one.candidate: one for one in EvaluationRow.select(db)}  # the newest evaluation of each candidate
    for row in CandidateRow.select(db):
        evaluation = evaluations.get(row.id)
        own = [v for v in verdicts if v["subject"] == str(Subject("candidate", row.id))]
        candidates.append(
            row.select_fields("id segment", "export_path export_sha256")
            | {
                "summary": evaluation and evaluation.summary,
                "verdict": own[-1] if own else None,
                "release": next((r["number"] for r in releases if r["candidate"] == row.id), None),
            }
        )
    accepted = {
        row["subject"]: {"by": row["detail"]["by"], "at": row["at"]}
        for row in db.read("SELECT subject, at, detail FROM events WHERE kind = 'certificate_accepted' ORDER BY id")
    }
    certificates = [
        {"segment": Subject.parse(v["subject"]).number, **v, "accepted": accepted.get(v["subject"])}
        for v in verdicts
        if v["gate"] in ("code", "preflight")
    ]
    drawn = db.read("SELECT subject, detail FROM events WHERE kind = 'audit_drawn' ORDER BY id")
    audits = [
        {"segment": Subject.parse(subject).number, **window}
        | {"verdict": next((v for v in reversed(verdicts) if (v["gate"], v["subject"]) == ("audit", subject)), None)}
        for subject, window in {row["subject"]: row["detail"] for row in drawn}.items()
        if window["last"] > 0
    ]
    totals: dict[str, dict[str, int]] = {}
    for shard in shards:
        for domain, facts in (shard["domains"] or {}).items():
            total = totals.setdefault(domain, {"documents": 0, "tokens": 0, "supervised_tokens": 0})
            for key in total:
                total[key] += facts.get(key, 0)
    best = find_champion(db)
    inbox = [path for path in workspace.inbox.glob("*") if path.is_file() and not path.name.startswith(".")]
    return {
        "workspace": str(workspace.root),
        "waiting_in_inbox": len(inbox),
        "shards": shards,
        "domains": totals,
        "segments": segments,
        "certificates": certificates,
        "audits": audits,
        "candidates": candidates,
        "releases": releases,
        "champion": best.select_fields("number candidate", "mlflow_version export_path", "created_at")
        if best
        else None,
        "proposals": [row.select_fields(*PROPOSAL_FIELDS) for row in ProposalRow.select(db)],
        "anomalies": list_anomalies(db)[::-1][:20],
        "removals": [vars(removal) for removal in list_removals(db)],
        "marked_releases": list_releases_with_removed_data(db),
    }


def format_status(facts: dict[str, Any]) -> list[Message]:
    """Return the lines of ``factory status`` for a person, from ``read_status``'s data."""
    return [
        Message("ledger.workspace", "workspace {folder}", folder=facts["workspace"]),
        *_data_lines(facts),
        *(_segment_line(segment) for segment in facts["segments"][-6:]),
        *_certificate_lines(facts),
        *_audit_lines(facts["audits"]),
        *_anomaly_lines(facts),
        *(_candidate_line(candidate) for candidate in facts["candidates"][-6:]),
        _champion_line(facts["champion"]),
        *(
            Message(
                "ledger.proposal",
                "proposal {number} {branch}: {title} → {state}",
                number=proposal["number"],
                branch=proposal["branch"],
                title=proposal["title"],
                state=proposal["outcome"] or proposal["state"],
            )
            for proposal in facts["proposals"][-6:]
        ),
    ]


def _data_lines(facts: dict[str, Any]) -> list[Message]:
    """Return lines about shards, domains, held-out and dropped documents, quarantined shards and removals."""
    dropped: dict[str, int] = {}
    for shard in facts["shards"]:
        for rule, number in ((shard["counts"] or {}).get("dropped") or {}).items():
            dropped[rule] = dropped.get(rule, 0) + number
    quarantined = [shard for shard in facts["shards"] if shard["state"] == "quarantined"]
    lines = [
        Message(
            "ledger.shards",
            "data      {shards:,|shard|shards} in the ledger, {quarantined:,} quarantined; {waiting:,|file waits|files wait} in the inbox",
            shards=len(facts["shards"]),
            quarantined=len(quarantined),
            waiting=facts["waiting_in_inbox"],
        )
    ]
    for domain, total in sorted(facts["domains"].items()):
        lines.append(
            Message(
                "ledger.domain",
                "          {domain:<8} {documents:>6,} documents  {tokens:>10,} tokens, {supervised_tokens:>10,} of them with loss",
                domain=domain,
                **total,
            )
        )
    lines.append(
        Message(
            "ledger.held_out",
            "          held out: {documents:,|document|documents}; dropped: {dropped}",
            documents=sum((shard["counts"] or {}).get("held_out", 0) for shard in facts["shards"]),
            dropped=[f"{rule} {n:,}" for rule, n in sorted(dropped.items(), key=lambda kv: -kv[1])] or "none",
        )
    )
    for shard in quarantined:
        lines.append(
            Message(
                "ledger.quarantined_shard",
                "          the shard {shard} is quarantined: {why}",
                shard=shard["name"],
                why=shard["reason"],
            )
        )
    if taken := [removal for removal in facts["removals"] if removal["state"] != "returned"]:
        lines.append(
            Message(
                "ledger.removals",
                "          {documents:,|document|documents} removed by {removals:,|removal|removals}",
                removals=len(taken),
                documents=sum(removal["documents"] for removal in taken),
            )
        )
        if erasing := sum(removal["erase"] and removal["state"] == "removed" for removal in taken):
            lines.append(
                Message(
                    "ledger.to_erase",
                    "          the factory still has to erase the text of {removals:,|removal|removals}",
                    removals=erasing,
                )
            )
    return lines


def _segment_line(segment: dict[str, Any]) -> Message:
    result = segment["result"] or {}
    said: list[str] = [
        segment["state"] + (f" {format_local_time(segment['finished_at'])}" if segment["finished_at"] else "")
    ]
    said += [f"loss {result['loss']:.3f}"] if isinstance(result.get("loss"), float) else []
    said += _speed(result.get("speed"))
    said += [describe_average(result["averaged"])] if "averaged" in result else []
    said += [describe_import(result["imported"])] if "imported" in result else []
    return Message(
        "ledger.segment",
        "segment {number:<2} {kind:<6} steps {first}–{last}, data generation {generation}, precision {precision}, {facts}",
        number=segment["id"],
        kind=segment["kind"],
        first=segment["first_step"],
        last=segment["last_step"],
        generation=segment["generation"],
        precision=segment["precision"],
        facts=said,
    )


def describe_import(imported: dict[str, Any]) -> Message:
    """Describe the source of an imported model in a few words."""
    return Message(
        "ledger.imported",
        "imported from {name} ({architecture}), licence {licence}",
        name=imported["name"],
        architecture=imported["class"],
        licence=imported["licence"] or "not named",
    )


def _certificate_lines(facts: dict[str, Any]) -> list[Message]:
    """Return lines about the newest segment's code, if the segment waits for a certificate."""
    trained = [segment for segment in facts["segments"] if segment["kind"] not in WITHOUT_STEPS]
    waiting = {segment["id"] for segment in trained[-1:] if segment["state"] == "uncertified"}
    lines = []
    for certificate in facts["certificates"]:
        if certificate["segment"] in waiting and certificate["outcome"] != "promote" and not certificate["accepted"]:
            lines += [
                Message(
                    "ledger.not_certified",
                    "          the code of this segment is not certified: {why}",
                    why=certificate["reasons"][0],
                ),
                Message(
                    "ledger.certify",
                    "          Training waits until a person changes or accepts this code. To see all measurements: 'factory certify'. To "
                    "accept the code: 'factory certify --accept {segment}'",
                    segment=certificate["segment"],
                ),
            ]
    return lines


def _candidate_line(candidate: dict[str, Any]) -> Message:
    bpb = ((candidate["summary"] or {}).get("bpb")) or {}
    verdict = candidate["verdict"]
    return Message(
        "ledger.candidate",
        "candidate {number}  verdict: {outcome}{released}; bits per byte: {bits_per_byte}",
        number=candidate["id"],
        outcome=f"{verdict['outcome']} {format_local_time(verdict['created_at'])}" if verdict else "none yet",
        released=f" → release {candidate['release']}" if candidate["release"] is not None else "",
        bits_per_byte=[f"{domain} {value:.3f}" for domain, value in sorted(bpb.items()) if isinstance(value, float)],
    )


def _champion_line(best: dict[str, Any] | None) -> Message:
    if best is None:
        return Message("ledger.no_champion", "champion  none yet")
    return Message(
        "ledger.champion",
        "champion  release {release}, released {at}, export {export}",
        release=best["number"],
        at=format_local_time(best["created_at"]),
        export=best["export_path"],
    )


def _speed(speed: object) -> list[str]:
    """Format the valid parts of the speed that a trainer reported: '18,400 tokens/s', 'MFU 41.2 %', 'first step 35.0 s'."""
    said = speed if isinstance(speed, dict) else {}
    number = {key: value for key, value in said.items() if isinstance(value, float) and 0 <= value < 1e18}
    words = [f"{number['tokens_per_s']:,.0f} tokens/s"] if "tokens_per_s" in number else []
    words += [f"MFU {100 * number['mfu']:.1f} %"] if "mfu" in number else []
    return words + ([f"first step {number['first_step_s']:.1f} s"] if "first_step_s" in number else [])


def _anomaly_lines(facts: dict[str, Any]) -> list[Message]:
    """Return lines about each diagnosed episode, and about releases trained on documents that were quarantined or removed later."""
    lines = []
    for row in facts["anomalies"]:
        if row["kind"] == GAIN_ON_DEV_ONLY and row["state"] == "open":
            lines.append(
                Message(
                    "ledger.dev_alone",
                    "anomaly {number} {kind}: the candidate of segment {segment} gains only on the dev half of the held-out "
                    "documents. The release gate blocks the candidate. The numbers are in the verdict of the gate",
                    number=row["id"],
                    kind=row["kind"],
                    segment=row["segment"],
                )
            )
        if row["id"] == row["lead"]:
            open_ = row["state"] not in ("closed", "rewound")
            lines.append(
                Message(
                    "ledger.anomaly",
                    "anomaly {number} {kind} at step {step} of segment {segment}: the diagnosis is {causes}; state: {state}{command}",
                    number=row["id"],
                    kind=row["kind"],
                    step=row["step"],
                    segment=row["segment"],
                    causes=" or ".join(row["causes"]),
                    state=row["how"] or row["state"].replace("diagnosed", "open"),
                    command=Message(
                        "ledger.anomaly_command", "; for details: 'factory anomalies show {number}'", number=row["id"]
                    )
                    if open_
                    else "",
                )
            )
    for mark in facts["marked_releases"]:
        lines.append(Message("ledger.marked_release", "          {mark}", mark=describe_removed_training_data(mark)))
    return lines


def _audit_lines(audits: list[dict[str, Any]]) -> list[Message]:
    """Return one line that counts the audited windows, and a line for each window that differs or was not measured."""
    if not audits:
        return []
    outcomes = [audit["verdict"]["outcome"] if audit["verdict"] else "waiting" for audit in audits]
    lines = [
        Message(
            "ledger.audits",
            "audits    an audit repeats the training of a window of steps without agents' patches. In {agree} of "
            "{windows:,|window|windows}, the repetition agrees; {waiting:,|window is|windows are} not audited yet",
            agree=outcomes.count("promote"),
            windows=len(audits),
            waiting=outcomes.count("waiting"),
        )
    ]
    for audit, outcome in zip(audits, outcomes, strict=True):
        if outcome in ("reject", "hold"):
            lines.append(
                Message(
                    "ledger.audited_window",
                    "          segment {segment}, steps {first}–{last}: {state}; {why}",
                    segment=audit["segment"],
                    first=audit["first"],
                    last=audit["last"],
                    state=Message("ledger.audit_differs", "the repetition without agents' patches DIFFERS")
                    if outcome == "reject"
                    else Message("ledger.audit_not_compared", "the audit could not compare the steps"),
                    why=audit["verdict"]["reasons"][0],
                )
            )
    return lines


def describe_average(averaged: dict[str, Any]) -> Message:
    """Describe the field ``averaged`` of the result of an average segment: 'average of 3 checkpoints (steps 10, 15, 20; equal weights)'."""
    parts = averaged["sources"]
    if averaged["rule"] == "uniform":
        return Message(
            "ledger.uniform_average",
            "average of {count} checkpoints (steps {steps}; equal weights)",
            count=len(parts),
            steps=[part["step"] for part in parts],
        )
    if averaged["rule"] == "release":
        old, new = parts
        holds: str = Message("ledger.guards_hold", "no domain of the dev half is worse than the release's")
        loses = Message(
            "ledger.guards_lost", "each weight loses something that the release knew, and this weight the least"
        )
        return Message(
            "ledger.release_average",
            "average of release {release} × {old:.2f} and step {step} × {new:.2f} ({guards})",
            release=averaged["release"], old=old["weight"], step=new["step"], new=new["weight"],
            guards=holds if averaged["guards_hold"] else loses,
        )  # fmt: skip
    return Message(
        "ledger.weighted_average",
        "average of {count} checkpoints (step × weight: {steps}; the weights come from the loss on the dev half of the held-out documents)",
        count=len(parts),
        steps=[f"{part['step']} × {part['weight']:.2f}" for part in parts],
    )
