"""The facts of ``factory status`` and of the demo's last screen, read from the ledger alone."""

from __future__ import annotations

import time
from typing import Any

from factory.core.workspace import Workspace
from factory.ledger.anomalies import DEV_ALONE, every_anomaly
from factory.ledger.reader import Reader
from factory.ledger.removals import mark_in_words, marks, removals
from factory.ledger.rows import (
    CandidateRow,
    EvaluationRow,
    ProposalRow,
    ReleaseRow,
    SegmentRow,
    Subject,
    VerdictRow,
    champion,
)

SEGMENT = "id kind parent generation recipe code_commit first_step last_step state attempts result created_at finished_at folder"
PROPOSAL = "number agent target title hypothesis predicted_gain branch state report outcome reasons"


def snapshot(workspace: Workspace) -> dict[str, Any]:
    """The facts of ``factory status``, as JSON-ready data."""
    db = Reader(workspace)
    shards = db.read(
        "SELECT name, sha256, state, reason, rows, counts, domains, tokens FROM shards ORDER BY ingested_at"
    )
    segments = [row.only(SEGMENT) | {"precision": row.recipe_json["precision"]} for row in SegmentRow.select(db)]
    verdicts = [row.only("id gate subject against outcome reasons created_at") for row in VerdictRow.select(db)]
    releases = [
        row.only("number candidate verdict state mlflow_version report created_at") for row in ReleaseRow.select(db)
    ]
    candidates = []
    evaluations = {one.candidate: one for one in EvaluationRow.select(db)}  # the newest of each
    for row in CandidateRow.select(db):
        evaluation = evaluations.get(row.id)
        own = [v for v in verdicts if v["subject"] == str(Subject("candidate", row.id))]
        candidates.append(
            row.only("id segment export_path export_sha256")
            | {
                "summary": evaluation and evaluation.summary,
                "verdict": {k: own[-1][k] for k in ("id", "outcome", "reasons", "against", "created_at")}
                if own
                else None,
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
        if window["last"] > window["first"]
    ]
    totals: dict[str, dict[str, int]] = {}
    for shard in shards:
        for domain, facts in (shard["domains"] or {}).items():
            total = totals.setdefault(domain, {"documents": 0, "tokens": 0, "supervised_tokens": 0})
            for key in total:
                total[key] += facts.get(key, 0)
    best = champion(db)
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
        "champion": best.only("number candidate mlflow_version export_path created_at") if best else None,
        "proposals": [row.only(PROPOSAL) for row in ProposalRow.select(db)],
        "anomalies": every_anomaly(db)[::-1][:20],
        "removals": [vars(removal) for removal in removals(db)],
        "marked_releases": marks(db),
    }


def screen(facts: dict[str, Any]) -> list[str]:
    """``snapshot`` as lines for a person."""
    lines = [f"workspace {facts['workspace']}"]
    dropped: dict[str, int] = {}
    for shard in facts["shards"]:
        for rule, number in ((shard["counts"] or {}).get("dropped") or {}).items():
            dropped[rule] = dropped.get(rule, 0) + number
    quarantined = [shard for shard in facts["shards"] if shard["state"] == "quarantined"]
    held_out = sum((shard["counts"] or {}).get("held_out", 0) for shard in facts["shards"])
    lines.append(
        f"data      {len(facts['shards'])} shards in, {len(quarantined)} quarantined; {facts['waiting_in_inbox']} waiting in the inbox"
    )
    for domain, total in sorted(facts["domains"].items()):
        lines.append(
            f"          {domain:<8} {total['documents']:>6,} documents  {total['tokens']:>10,} tokens  "
            f"{total['supervised_tokens']:>10,} with loss"
        )
    lines.append(
        f"          held out {held_out:,} documents; dropped "
        + (", ".join(f"{rule} {n:,}" for rule, n in sorted(dropped.items(), key=lambda kv: -kv[1])) or "none")
    )
    for shard in quarantined:
        lines.append(f"          quarantined {shard['name']}: {shard['reason']}")
    if taken := [removal for removal in facts["removals"] if removal["state"] != "returned"]:
        erasing = sum(removal["erase"] and removal["state"] == "removed" for removal in taken)
        waits = f"; text of {erasing} is still to be erased" if erasing else ""
        documents = sum(removal["documents"] for removal in taken)
        lines.append(f"          {len(taken)} removals took out {documents:,} documents{waits}")
    for segment in facts["segments"][-6:]:
        loss = (segment["result"] or {}).get("loss")
        lines.append(
            f"segment {segment['id']:<2} {segment['kind']:<6} steps {segment['first_step']}–{segment['last_step']} "
            f"generation {segment['generation']} in {segment['precision']}, {segment['state']}"
            + (f" {_at(segment['finished_at'])}" if segment["finished_at"] else "")
            + (f", loss {loss:.3f}" if isinstance(loss, float) else "")
            + _speed((segment["result"] or {}).get("speed"))
            + (
                f", {describe_average(segment['result']['averaged'])}"
                if "averaged" in (segment["result"] or {})
                else ""
            )
        )
    trained = [segment for segment in facts["segments"] if segment["kind"] != "average"]
    waiting = {segment["id"] for segment in trained[-1:] if segment["state"] == "uncertified"}
    for certificate in facts["certificates"]:
        if certificate["segment"] in waiting and certificate["outcome"] != "promote" and not certificate["accepted"]:
            lines.append(f"          its code is not certified: {certificate['reasons'][0]}")
            lines.append(
                "          training waits for other code, or for 'factory certify --accept "
                f"{certificate['segment']}'; all measures: 'factory certify'"
            )
    lines += _audit_lines(facts["audits"])
    lines += _anomaly_lines(facts)
    for candidate in facts["candidates"][-6:]:
        bpb = ((candidate["summary"] or {}).get("bpb")) or {}
        words = ", ".join(f"{domain} {value:.3f}" for domain, value in sorted(bpb.items()) if isinstance(value, float))
        verdict = candidate["verdict"]
        outcome = f"{verdict['outcome']} {_at(verdict['created_at'])}" if verdict else "not judged yet"
        released = f" → release {candidate['release']}" if candidate["release"] else ""
        lines.append(f"candidate {candidate['id']}  {outcome}{released}  bits per byte: {words}")
    best = facts["champion"]
    since = f" of {_at(best['created_at'])}" if best else ""
    lines.append(f"champion  release {best['number']}{since} ({best['export_path']})" if best else "champion  none yet")
    for proposal in facts["proposals"][-6:]:
        lines.append(
            f"proposal {proposal['number']} {proposal['branch']}: {proposal['title']} → {proposal['outcome'] or proposal['state']}"
        )
    return lines


def _speed(speed: object) -> str:
    """', 18,400 tokens/s, MFU 41.2 %, first step 35.0 s' of what a trainer left, as far as it says so; '' of an older one."""
    said = speed if isinstance(speed, dict) else {}
    number = {key: value for key, value in said.items() if isinstance(value, float) and 0 <= value < 1e18}
    words = [f"{number['tokens_per_s']:,.0f} tokens/s"] if "tokens_per_s" in number else []
    words += [f"MFU {100 * number['mfu']:.1f} %"] if "mfu" in number else []
    words += [f"first step {number['first_step_s']:.1f} s"] if "first_step_s" in number else []
    return "".join(f", {word}" for word in words)


def _anomaly_lines(facts: dict[str, Any]) -> list[str]:
    """One on each episode that was diagnosed, one on releases that saw documents which were quarantined later."""
    lines = []
    for row in facts["anomalies"]:
        if row["kind"] == DEV_ALONE and row["state"] == "open":
            lines.append(
                f"anomaly {row['id']} {row['kind']}: the candidate of segment {row['segment']} gains on the dev half alone, and is held; "
                "its verdict has the numbers"
            )
        if row["id"] == row["lead"]:
            asks = "" if row["state"] in ("closed", "rewound") else f"; 'factory anomalies show {row['id']}'"
            lines.append(
                f"anomaly {row['id']} {row['kind']} at step {row['step']} of segment {row['segment']}: {' or '.join(row['causes'])}; "
                f"{row['how'] or row['state'].replace('diagnosed', 'open')}{asks}"
            )
    lines += [f"          {mark_in_words(mark)}" for mark in facts["marked_releases"]]
    return lines


def _audit_lines(audits: list[dict[str, Any]]) -> list[str]:
    """One line on those that agree or wait, and one on each that does not agree."""
    if not audits:
        return []
    outcomes = [audit["verdict"]["outcome"] if audit["verdict"] else "waiting" for audit in audits]
    agree, wait = outcomes.count("promote"), outcomes.count("waiting")
    lines = [f"audits    {agree} of {len(audits)} windows agree with the code without agents' patches, {wait} wait"]
    for audit, outcome in zip(audits, outcomes, strict=True):
        if outcome in ("reject", "hold"):
            state = "DIFFERS" if outcome == "reject" else "not measured"
            lines.append(
                f"          segment {audit['segment']}, steps {audit['first']}–{audit['last']}: {state}; {audit['verdict']['reasons'][0]}"
            )
    return lines


def describe_average(averaged: dict[str, Any]) -> str:
    """``averaged`` of an average segment's result in words: 'average of 3 checkpoints (steps 10, 15, 20; uniform)'."""
    parts = averaged["sources"]
    if averaged["rule"] == "uniform":
        return f"average of {len(parts)} checkpoints (steps {', '.join(str(part['step']) for part in parts)}; uniform)"
    listed = ", ".join(f"{part['step']} × {part['weight']:.2f}" for part in parts)
    return f"average of {len(parts)} checkpoints (steps {listed}; by loss on the dev half of what is held out)"


def _at(moment: float) -> str:
    """Seconds since 1970 in this machine's time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
