"""The demo's last screen: what 'factory status' shows, the scores of each candidate, and why it was released, and each proposal merged, or not."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from factory.core.workspace import Workspace
from factory.ledger.status import screen


def summary(workspace: Workspace, facts: dict[str, Any], seconds: float) -> list[str]:
    """Lines for a person, from ``factory.ledger.status.snapshot``."""
    factory = shlex.quote(sys.argv[0]) if "/" in sys.argv[0] else "factory"
    if Path(sys.argv[0]).resolve().is_relative_to(Path.cwd()):
        factory = str(Path(sys.argv[0]).resolve().relative_to(Path.cwd()))
    if Path(sys.argv[0]).name == "__main__.py":
        factory = "python -m factory"
    where = "" if workspace.root == Path.cwd() / "workspace" else f" --workspace {shlex.quote(str(workspace.root))}"
    asked = [f"{factory} status{where}"]
    asked += [f"{factory} proposals show {facts['proposals'][-1]['number']}{where}"] if facts["proposals"] else []
    asked += [f"{factory} provenance --release {facts['releases'][-1]['number']}{where}"] if facts["releases"] else []
    seen = [f"    {line}" for line in screen(facts)]
    lines = [*seen, "", *_scores(facts), "", *_releases(facts), "", *_proposals(facts), ""]
    lines += [
        f"  This run took {seconds / 60:.1f} minutes. Every number above was read back from {workspace.root / 'ledger.db'}.",
        "",
        f"  Look at it:  {factory} ui{where}    (MLflow: runs, the model's versions, verdicts, reports)",
        "  Ask:         " + "\n               ".join(asked),
        f"  Feed it:     cp your-shards/*.jsonl {shlex.quote(str(workspace.inbox))}/ && {factory} run --once{where}",
    ]
    return lines


def _scores(facts: dict[str, Any]) -> list[str]:
    """A table of held-out measurements, beside those of byte models: none before there is a candidate."""
    measured = [candidate for candidate in facts["candidates"] if (candidate["summary"] or {}).get("bpb")]
    if not measured:
        return []
    newest = measured[-1]["summary"]
    domains = sorted(newest["bpb"])
    lines = ["    held-out bits per byte " + "".join(f"{domain:>9}" for domain in domains) + "    cloze right"]
    baselines = newest.get("baselines") or {}
    for name in sorted({n for domain in domains for n in baselines.get(domain, {}) if n.endswith("gram")}):
        cells = "".join(_cell(baselines.get(domain, {}).get(name)) for domain in domains)
        lines.append(f"      {'byte ' + name.replace('_', ' '):<21}{cells}")
    for candidate in measured:
        own = candidate["summary"]
        cells, right = "".join(_cell(own["bpb"].get(domain)) for domain in domains), own["cloze"].get("share_right")
        lines.append(f"      candidate {candidate['id']:<11}{cells}" + (f"{right:>10.0%}" if right is not None else ""))
    return lines


def _cell(value: Any) -> str:
    return f"{value:>9.3f}" if isinstance(value, float) else f"{'–':>9}"


def _releases(facts: dict[str, Any]) -> list[str]:
    lines = ["  WHAT WAS RELEASED, AND WHY"]
    for candidate in facts["candidates"]:
        verdict = candidate["verdict"]
        outcome = verdict["outcome"].upper() if verdict else "not judged"
        lines.append(
            f"    candidate {candidate['id']}: {outcome}"
            + (f" → release {candidate['release']}" if candidate["release"] else "")
        )
        lines += [f"      {reason}" for reason in (verdict["reasons"] if verdict else [])]
    return lines


def _proposals(facts: dict[str, Any]) -> list[str]:
    lines = ["  WHAT WAS PROPOSED, AND WHY IT WAS KEPT OR NOT"]
    for proposal in facts["proposals"]:
        lines.append(
            f"    proposal {proposal['number']} by {proposal['agent']}: {proposal['title']}  (branch {proposal['branch']})"
        )
        lines.append(f"      hypothesis: {proposal['hypothesis']}")
        lines.append(f"      {(proposal['outcome'] or proposal['state']).upper()}")
        lines += [f"      {reason}" for reason in proposal["reasons"] or []]
    return lines if facts["proposals"] else [*lines, "    nothing"]
