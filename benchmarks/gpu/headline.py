"""What a person must know first of a run's records, and the exit code. Pure: records in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernels.contract.choice import split_implementation_names

Record = dict[str, Any]
NOTHING = "nothing was judged"


@dataclass
class Judged:
    """Of the part 'right': sums over the implementations of which a check ran."""

    right: int = 0
    checks: int = 0
    not_reached: int = 0
    implementations: list[str] = field(default_factory=list)
    none_run: list[str] = field(default_factory=list)  # those of which none did


def judged_of(records: Sequence[Record]) -> Judged:
    crashed = {r["item"] for r in of(records, "wrong")}
    found = Judged(none_run=[name for name in unjudged(records) if name not in crashed])
    for r in of(records, "judged"):
        name = f"{r['op']}/{r['implementation']}"
        if not r["right"] and not r["wrong"]:
            found.none_run.append(name)
            continue
        found.implementations.append(name)
        found.right += r["right"]
        found.checks += r["checks"]
        found.not_reached += len(r["not_reached"])
    return found


def unjudged(records: Sequence[Record]) -> dict[str, str]:
    """Implementations that the part 'right' named and did not judge, and why."""
    names = [name for r in of(records, "items") if r["part"] == "right" for name in r["names"]]
    done = {f"{r['op']}/{r['implementation']}" for r in of(records, "judged")}
    lost = {r["what"]: r["why"] for r in of(records, "not run") if r["part"] == "right"}
    return {name: lost.get(name, "not reached") for name in names if name not in done}


def agreed(records: Sequence[Record]) -> list[str]:
    """Implementations of this repository that 'fast' compared with their reference."""
    timed = [r for r in of(records, "timed") if r["implementation"] not in ("", "reference") and not r["wrong"]]
    return sorted({f"{r['op']}/{r['implementation']}" for r in timed})


def status(records: Sequence[Record]) -> int:
    """The exit code: 0 right as far as it went, 1 something is wrong or one of ours failed, 3 nothing was judged."""
    if of(records, "wrong") or of(records, "failed"):
        return 1
    return 0 if judged_of(records).right or agreed(records) else 3


def is_right(records: Sequence[Record]) -> bool | None:
    """None: nothing was judged."""
    if of(records, "wrong"):
        return False
    return True if judged_of(records).right or agreed(records) else None


def headline(records: Sequence[Record]) -> str:
    """A wrong result, one of ours that fails, else how much was found right; and what makes the rest worth less."""
    said = [*sick(records)]
    found = judged_of(records)
    if found.implementations:
        count = len(found.implementations)
        said.append(f"Right: {found.right:,} of {found.checks:,} checks of {count} implementations")
        said += [f"{found.not_reached:,} checks were not reached"] * bool(found.not_reached)
        said += [f"none run: {', '.join(found.none_run)}"] * bool(found.none_run)
    elif names := agreed(records):
        said.append(
            f"{len(names)} implementations agree with their reference on a small case; the part 'right' judged none"
        )
    elif not said:
        said.append(NOTHING)
    said += [f"fallback in the step: {one}" for one in fallbacks(records)]
    if failed := [f"{r['part']}/{r['item']} ({r['state']})" for r in of(records, "ended") if r["state"] != "done"]:
        said.append(f"did not end well: {', '.join(failed)}")
    said += [f"the card was busy: {busy}" for busy in [busy_of(records)] if busy]
    return "; ".join(said) + "."


def sick(records: Sequence[Record]) -> Iterable[str]:
    if wrong := of(records, "wrong"):
        yield f"WRONG: {wrong[0]['what']}: {wrong[0]['why']}" + more(wrong)
    if failed := of(records, "failed"):
        first = failed[0]
        yield f"FAILED: {first['op']}/{first['by']} at {first['width']}: {first['why']}" + more(failed)


def more(records: Sequence[Record]) -> str:
    return f", and {len(records) - 1} more" if len(records) > 1 else ""


def falls_back(record: Record) -> bool:
    """Of the kind "computing": is it another than the first that was chosen?"""
    return str(record["by"]).partition(",")[0] != split_implementation_names(record["chosen"])[0]


def fallbacks(records: Sequence[Record]) -> list[str]:
    """Each op for which another computes than the first that was chosen, once for all models."""
    found: dict[str, list[str]] = {}
    for r in of(records, "computing"):
        if falls_back(r):
            found.setdefault(
                f"{r['op']} by {r['by'] or 'nothing'} for {split_implementation_names(r['chosen'])[0]}", []
            ).append(r["item"])
    return [f"{what} ({', '.join(items)})" for what, items in found.items()]


def busy_of(records: Sequence[Record]) -> str:
    """What else was on the card, by 'facts' and by the looks before each part; '': nothing was seen."""
    found = [str(r["value"]) for r in of(records, "number") if r["part"] == "facts" and r["name"] == "busy"]
    said = [value for value in found if value != "no"]
    for r in of(records, "look"):
        if r["when"] == "before" and r["processes"]:
            said.append(f"{r['processes']} other processes before the part '{r['part']}'")
    return ", ".join(said)


def unfinished(records: Sequence[Record]) -> str:
    """Of a run whose end is not written: which parts are missing; '': it has ended."""
    run = next(iter(of(records, "run")), {})
    if of(records, "end"):
        return ""
    there = {r["part"] for r in of(records, "part")}
    asked = dict.fromkeys(["facts", *run.get("asked", [])])
    missing = [name for name in asked if name not in there]
    return f"not finished; parts missing: {', '.join(missing) or 'none, but its end'}"


def of(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]
