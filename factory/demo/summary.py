"""The demo's last screen, read from the ledger: ingested and dropped documents, training, releases and proposals, with the reasons."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factory.core.verdict_lines import format_verdict_lines
from factory.core.workspace import Workspace
from factory.ledger.reader import LedgerReader
from factory.ledger.rows import CandidateRow, SegmentRow, SqlReader, VerdictRow
from factory.ledger.status import describe_average
from kernels.contract.message import Message


def summarise_demo(workspace: Workspace, facts: dict[str, Any], seconds: float) -> list[str]:
    """Return lines for a person. ``facts``: from ``factory.ledger.status.read_status``."""
    factory = shlex.quote(sys.argv[0]) if "/" in sys.argv[0] else "factory"
    if Path(sys.argv[0]).resolve().is_relative_to(Path.cwd()):
        factory = str(Path(sys.argv[0]).resolve().relative_to(Path.cwd()))
    if Path(sys.argv[0]).name == "__main__.py":
        factory = "python -m factory"
    where = "" if workspace.root == Path.cwd() / "workspace" else f" --workspace {shlex.quote(str(workspace.root))}"
    asked = [f"{factory} status{where}"]
    asked += [f"{factory} proposals show {facts['proposals'][-1]['number']}{where}"] if facts["proposals"] else []
    asked += [f"{factory} provenance --release {facts['releases'][-1]['number']}{where}"] if facts["releases"] else []
    lines = [*_data(facts), "", *_training(facts), "", *_releases(facts), "", *_proposals(facts), ""]
    lines += [*_numbers(LedgerReader(workspace), facts, seconds), ""]
    lines += [
        Message(
            "summary.source",
            "  All numbers above except the cost are from {ledger}.",
            ledger=workspace.root / "ledger.db",
        ),
        "",
        Message(
            "summary.look",
            "  See MLflow:  {command}    (runs, versions of the model, verdicts, reports)",
            command=f"{factory} ui{where}",
        ),
        "  See records: " + "\n               ".join(asked),
        Message(
            "summary.feed",
            "  Add shards:  cp your-shards/*.jsonl {inbox}/ && {command}",
            inbox=shlex.quote(str(workspace.inbox)),
            command=f"{factory} run --once{where}",
        ),
    ]
    return lines


def _data(facts: dict[str, Any]) -> list[str]:
    lines = ["  DATA"]
    for shard in facts["shards"]:
        counts = shard["counts"] or {}
        dropped = counts.get("dropped") or {}
        why = ", ".join(f"{rule} {n:,}" for rule, n in sorted(dropped.items(), key=lambda kv: -kv[1]))
        state = (
            f"QUARANTINED ({shard['reason']})"
            if shard["state"] == "quarantined"
            else f"{counts.get('train', 0):>6,} kept  {counts.get('held_out', 0):>4,} held out"
        )
        lines.append(
            f"    {shard['name']:<22}{shard['rows']:>7,} documents  {state}  {sum(dropped.values()):>5,} dropped{': ' + why if why else ''}"
        )
    total = sum(domain["tokens"] for domain in facts["domains"].values())
    loss = sum(domain["supervised_tokens"] for domain in facts["domains"].values())
    lines.append(
        Message(
            "summary.tokens",
            "    total: {tokens:,} training tokens, of which {supervised:,} count in the loss. Tokens by domain: {domains}",
            tokens=total,
            supervised=loss,
            domains=[f"{domain} {counts['tokens']:,}" for domain, counts in sorted(facts["domains"].items())],
        )
    )
    return lines


def _training(facts: dict[str, Any]) -> list[str]:
    lines = ["  TRAINING"]
    for segment in facts["segments"]:
        result = segment["result"] or {}
        seconds = result.get("seconds")
        rate = (
            f", {result['tokens'] / seconds:,.0f} tokens/s in {segment['precision']}"
            if seconds and result.get("tokens")
            else ""
        )
        first, last = result.get("first_loss"), result.get("loss")
        moved = (
            f"loss {first:.2f} → {last:.2f}"
            if isinstance(first, float) and isinstance(last, float)
            else f"loss {last:.2f}"
            if isinstance(last, float)
            else describe_average(result["averaged"])
            if "averaged" in result
            else segment["state"]
        )
        lines.append(
            f"    segment {segment['id']} {segment['kind']:<7} steps {segment['first_step']:>4}–{segment['last_step']:<5} {moved}{rate}"
        )
    measured = [candidate for candidate in facts["candidates"] if (candidate["summary"] or {}).get("bpb")]
    if measured:
        newest = measured[-1]["summary"]
        domains = sorted(newest["bpb"])
        columns = "".join(f"{domain:>9}" for domain in domains)
        lines.append(
            Message("summary.bits", "    held-out bits per byte {domains}    cloze items correct", domains=columns)
        )
        baselines = newest.get("baselines") or {}
        for name in sorted({n for domain in domains for n in baselines.get(domain, {}) if n.endswith("gram")}):
            cells = "".join(_cell(baselines.get(domain, {}).get(name)) for domain in domains)
            lines.append(f"      {'byte ' + name.replace('_', ' '):<21}{cells}")
        for candidate in measured:
            own = candidate["summary"]
            cells = "".join(_cell(own["bpb"].get(domain)) for domain in domains)
            lines.append(f"      candidate {candidate['id']:<11}{cells}{_share(own.get('cloze') or {})}")
        chat = newest.get("chat") or {}
        if chat.get("with_code"):
            lines.append(
                Message(
                    "summary.chat",
                    "    in {right:.0f} of {asked} chat answers with code, the code is valid Python",
                    right=chat["parse"],
                    asked=chat["with_code"],
                )
            )
    return lines


def _share(cloze: dict[str, Any]) -> str:
    right = cloze.get("share_right")
    return (
        f"{right:>10.0%} of {cloze['items']} (chance {cloze['chance']:.0%})"
        if isinstance(right, float)
        else f"{'–':>10}"
    )


def _cell(value: Any) -> str:
    return f"{value:>9.3f}" if isinstance(value, float) else f"{'–':>9}"


def _releases(facts: dict[str, Any]) -> list[str]:
    lines: list[str] = [Message("summary.releases", "  RELEASES, AND WHY")]
    for candidate in facts["candidates"]:
        verdict = candidate["verdict"]
        outcome = verdict["outcome"].upper() if verdict else "not judged"
        lines.append(
            f"    candidate {candidate['id']}: {outcome}"
            + (f" → release {candidate['release']}" if candidate["release"] is not None else "")
        )
        lines += [f"      {reason}" for reason in (verdict["reasons"] if verdict else [])]
    best = facts["champion"]
    if best:
        report = next((release["report"] for release in facts["releases"] if release["number"] == best["number"]), None)
        lines.append(
            Message(
                "summary.champion",
                "    champion: release {release}, version {version} in MLflow, {export}",
                release=best["number"],
                version=best["mlflow_version"],
                export=best["export_path"],
            )
        )
        lines += [f"    report:   {report}"] if report else []
    return lines


def _proposals(facts: dict[str, Any]) -> list[str]:
    lines: list[str] = [Message("summary.proposals", "  PROPOSED PATCHES, AND THEIR VERDICTS")]
    for proposal in facts["proposals"]:
        lines.append(
            f"    proposal {proposal['number']} by {proposal['agent']}: {proposal['title']}  (branch {proposal['branch']})"
        )
        lines.append(f"      hypothesis: {proposal['hypothesis']}")
        outcome = (proposal["outcome"] or proposal["state"]).upper()
        verdict = format_verdict_lines(outcome, proposal["reasons"] or [], proposal["number"], proposal["report"])
        lines += [f"      {line}" for line in verdict]
    return lines if facts["proposals"] else [*lines, "    nothing"]


@dataclass(frozen=True)
class JudgedShardTime:
    """The time from the ingest of a shard to the first verdict of the release gate on a candidate that was trained on the shard."""

    shard: str
    candidate: int
    outcome: str
    seconds: float  # from the moment that its ingest was recorded


def list_judged_shard_times(db: SqlReader) -> list[JudgedShardTime]:
    """Return the times of every ingested shard that has such a verdict, in the order in which the shards arrived."""
    shards = db.read("SELECT sha256, name, ingested_at FROM shards WHERE state = 'ingested' ORDER BY ingested_at")
    shard_of = {row["id"]: row["shard"] for row in db.read("SELECT id, shard FROM token_shards")}
    first: dict[str, VerdictRow] = {}
    for verdict in VerdictRow.select(db, "WHERE gate = 'release' ORDER BY id"):
        segment = SegmentRow.get(db, CandidateRow.get(db, verdict.subject_number).segment)
        (row,) = db.read("SELECT plan FROM data_plans WHERE id = :id", id=segment.data_plan)
        for planned in row["plan"]["token_shards"]:
            first.setdefault(shard_of.get(planned["id"], ""), verdict)
    return [
        JudgedShardTime(row["name"], judged.subject_number, judged.outcome, judged.created_at - row["ingested_at"])
        for row in shards
        if (judged := first.get(row["sha256"]))
    ]


def _numbers(db: SqlReader, facts: dict[str, Any], seconds: float) -> list[str]:
    """Return lines with numbers for a comparison with other systems. ``python -m benchmarks.headline`` measures the same with more care."""
    lines = ["  IN NUMBERS"]
    timed = [one for one in facts["segments"] if isinstance(_tokens_per_s(one), float)]
    if timed:
        lines.append(
            Message(
                "summary.speed",
                "    speed      training in segment {segment}: {rate:,.0f} tokens/s in {precision}{share}",
                rate=_tokens_per_s(timed[-1]),
                precision=timed[-1]["precision"],
                segment=timed[-1]["id"],
                share=_share_of_products(SegmentRow.get(db, timed[-1]["id"]), _tokens_per_s(timed[-1])),
            )
        )
    measured = [one for one in facts["candidates"] if (one["summary"] or {}).get("bpb")]
    if measured:
        own, baselines = measured[-1]["summary"]["bpb"], measured[-1]["summary"].get("baselines") or {}
        pairs = [
            f"{domain}{_cell(bits)} ({_cell((baselines.get(domain) or {}).get('trigram')).strip()})"
            for domain, bits in sorted(own.items())
        ]
        lines.append(
            Message(
                "summary.quality",
                "    quality    held-out bits per byte of candidate {candidate}, with those of a byte trigram model in brackets: {bits}",
                candidate=measured[-1]["id"],
                bits=" ".join(", ".join(pairs).split()),
            )
        )
    judged = list_judged_shard_times(db)
    if judged:
        newest = [one for one in judged if one.candidate == judged[-1].candidate]
        least, most = (f"{end(one.seconds for one in newest):.0f}" for end in (min, max))
        lines.append(
            Message(
                "summary.delay",
                "    delay      {seconds} s from the ingest of a shard to the verdict on candidate {candidate} ({shards})",
                seconds=least if least == most else f"{least} to {most}",
                candidate=judged[-1].candidate,
                shards=[one.shard for one in newest],
            )
        )
    cores = len(os.sched_getaffinity(0))  # the system does not count the time of processes that a sandbox ended
    lines.append(
        Message(
            "summary.cost",
            "    cost       this run took {minutes:.1f} minutes on {cores:,|core|cores}, which is at most {core_hours:.2f} core-hours",
            minutes=seconds / 60,
            cores=cores,
            core_hours=seconds * cores / 3600,
        )  # fmt: skip
    )
    return lines


def _tokens_per_s(segment: dict[str, Any]) -> Any:
    """Return the tokens per second of a segment's median step, as its trainer recorded them."""
    return ((segment["result"] or {}).get("speed") or {}).get("tokens_per_s")


def _share_of_products(segment: SegmentRow, tokens_per_s: float) -> str:
    """Return the model's FLOP/s as a share of the speed of its matrix products alone. The probe measured that speed when the segment was planned."""
    from trainer.contract.recipe import Recipe

    computing = segment.computing or {}
    probe = (computing.get("precision") or {}).get("probe") or {}
    rate = (probe.get("rates") or {}).get(segment.recipe_json["precision"], {}).get("products")
    threads = max(1, (computing.get("machine") or {}).get("threads") or 0)
    if not isinstance(rate, float) or rate <= 0:
        return ""
    share = tokens_per_s * Recipe.parse(segment.recipe_json).model.count_flops_per_token() / (rate * threads)
    return Message(
        "summary.share",
        " ({share:.0%} of the speed of pure matrix products on this machine)",
        share=share,
    )
