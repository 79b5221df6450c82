"""The report of a run's records: ``markdown`` for people, ``document`` as JSON. Pure: records in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.gpu import aims
from benchmarks.gpu.winners import verdicts

Record = dict[str, Any]
FORMAT = 1
UNITS = (("TB/s", "bytes/s", 1e12), ("TFLOP/s", "FLOP/s", 1e12), ("GB", "bytes", 1e9))


def document(records: Sequence[Record]) -> dict[str, Any]:
    """Everything, by part, with what follows from it. Every number has its unit, or a name that ends with one (``_s``: seconds)."""
    run = first(records, "run")
    wrong = of(records, "wrong")
    return {
        "format": FORMAT,
        "label": run.get("label", ""),
        "headline": headline(records),
        "right": not wrong,
        "busy": busy_of(records),
        "run": run,
        "facts": {r["name"]: {"value": r["value"], "unit": r["unit"]} for r in numbers(records, "facts")},
        "parts": of(records, "part"),
        "wrong": wrong,
        "judged": of(records, "judged"),
        "timed": of(records, "timed"),
        "keep_or_replace": [verdict.to_json() for verdict in verdicts(of(records, "timed"))],
        "numbers": [r for r in of(records, "number") if r["part"] != "facts"],
        "not_run": of(records, "not run"),
        "items": of(records, "ended"),
    }


def headline(records: Sequence[Record]) -> str:
    """What a person must know first: a wrong result, else how much was found right."""
    judged, wrong = of(records, "judged"), of(records, "wrong")
    if wrong:
        rest = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return f"WRONG: {wrong[0]['what']}: {wrong[0]['why']}{rest}"
    if not judged:
        return "No result was judged."
    checks, left = sum(r["right"] for r in judged), sum(len(r["not_reached"]) for r in judged)
    said = [f"Right: {checks:,} checks of {len(judged)} implementations"]
    said += [f"{left:,} checks were not reached"] * bool(left)
    if failed := [f"{r['part']}/{r['item']} ({r['state']})" for r in of(records, "ended") if r["state"] != "done"]:
        said.append(f"did not end well: {', '.join(failed)}")
    return "; ".join(said) + "."


def busy_of(records: Sequence[Record]) -> str:
    """What else was on the card; '': nothing was seen."""
    found = [r["value"] for r in numbers(records, "facts") if r["name"] == "busy"]
    return str(found[0]) if found and found[0] != "no" else ""


def markdown(records: Sequence[Record]) -> str:
    run, facts = first(records, "run"), {r["name"]: r for r in numbers(records, "facts")}
    said = lambda name: shown(facts[name]) if name in facts else "not known"
    label = f"**{run['label']}**\n\n" if run.get("label") else ""
    cut = [r for r in of(records, "part") if r["state"] == "cut"]
    lines = [
        f"# {said('card')}",
        "",
        f"{label}**{headline(records)}**",
        "",
        f"Made by `{run.get('command', '')}` at {run.get('began', '')}, commit `{said('commit')}`, limit {run.get('limit_s', 0) / 60:.1f} minutes.",
        *([f"**The card was busy: {busy_of(records)}. No time below is its own.**"] * bool(busy_of(records))),
        *(f"**Cut {r['why']} in the part '{r['part']}': what follows is what there was by then.**" for r in cut),
        "",
        "## The card",
        "",
        *table(
            ("what", "value", "note"),
            ((r["name"], shown(r), r.get("note", "")) for r in facts.values() if r["name"] != "slug"),
        ),
        *section("## The time", ("part", "how it ended", "seconds", "limit"), part_rows(records), "llrr"),
        *section(
            "## Right",
            ("op", "implementation", "right", "wrong", "not reached", "s"),
            right_rows(records),
            "llrrrr",
            RIGHT,
        ),
        *section("## Fast", FAST_COLUMNS, fast_rows(records), "lrlllrrrrrl", FAST),
        *section("## Keep or replace", ("op", "width", "verdict"), verdict_rows(records), "lrl", KEEP),
        *section("## Published marks", ("mark", "ours here"), mark_rows(records), "ll"),
        *section("## Step", ("item", "what", "value", "aim", "note"), number_rows(records, "step"), "llrll", STEP),
        *section("## Chain", ("item", "what", "value", "aim", "note"), number_rows(records, "chain"), "llrll"),
        *section("## Not run", ("part", "what", "why"), lost_rows(records), "lll"),
    ]
    return "\n".join(lines) + "\n"


RIGHT = (
    "Against the reference in fp64 on the same device: every output and every gradient, at most twice eager's error at the same dtype, and "
    "finite wherever eager is. The reference itself is what others are measured by."
)
FAST = (
    "Milliseconds of the forward pass and of forward and backward, by device events: the median. `floor` is the share of what the card can do at "
    "best: of the copy bandwidth or of the product rate above, whichever binds. `host` is the time until the host may go on. The winner is **bold**; "
    "a rival whose note says that it computes something else cannot win, and is named in the verdict where it is faster."
)
KEEP = "Ours is kept where it wins by more than the spread of both (quartiles); else the winner is named."
STEP = "The trainer's own step with `policies/kernels.yaml` as shipped; nothing is tuned by hand."
FAST_COLUMNS = ("op", "width", "shape", "by", "whose", "forward", "both", "quartiles", "floor", "host", "note")


def section(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], align: str = "", about: str = ""
) -> list[str]:
    every = list(rows)
    body = table(columns, every, align) if every else ["nothing"]
    return ["", title, "", *([about, ""] if about else []), *body]


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], align: str = "") -> list[str]:
    marks = {"r": "--:", "l": "---"}
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    rule = "|".join(marks[a] for a in (align or "l" * len(columns)))
    return ["| " + " | ".join(columns) + " |", f"|{rule}|", *("| " + " | ".join(row) + " |" for row in cells)]


def part_rows(records: Sequence[Record]) -> Iterable[Sequence[str]]:
    for r in of(records, "part"):
        why = f": {r['why']}" if r.get("why") else ""
        yield r["part"], f"{r['state']}{why}", f"{r['seconds']:.0f}", f"{r['limit_s']:.0f}"


def right_rows(records: Sequence[Record]) -> Iterable[Sequence[Any]]:
    for r in of(records, "judged"):
        wrong = f"**{len(r['wrong'])}**" if r["wrong"] else "0"
        yield r["op"], r["implementation"], r["right"], wrong, len(r["not_reached"]), f"{r['seconds']:.1f}"


def fast_rows(records: Sequence[Record]) -> Iterable[Sequence[str]]:
    best = {(v.op, v.width): v.winner for v in verdicts(of(records, "timed"))}
    for r in sorted(of(records, "timed"), key=lambda r: (r["op"], r["width"])):
        name = f"**{r['by']}**" if best.get((r["op"], r["width"])) == r["by"] else r["by"]
        share = f"{r['share']:.0%} {r['of']}" if r["share"] is not None else "–"
        times = [f"{r[key] * 1e3:.3f}" for key in ("forward_s", "both_s")]
        spread = f"{r['low_s'] * 1e3:.3f}–{r['high_s'] * 1e3:.3f} ms"
        yield (
            r["op"],
            r["width"],
            r["shape"],
            name,
            r["side"],
            *times,
            spread,
            share,
            f"{r['host_s'] * 1e6:.0f} µs",
            r["note"],
        )


def verdict_rows(records: Sequence[Record]) -> Iterable[Sequence[Any]]:
    for verdict in verdicts(of(records, "timed")):
        yield verdict.op, verdict.width, str(verdict)


def mark_rows(records: Sequence[Record]) -> Iterable[Sequence[str]]:
    timed = of(records, "timed")
    for name, mark in aims.PUBLISHED:
        ours = fastest_by_width(r for r in timed if r["op"] == name and r["side"] == "ours")
        said = [
            f"{r['by']} at {r['width']}: {r['both_s'] * 1e3:.2f} ms, {r['bytes'] / r['both_s'] / 1e12:.2f} TB/s, host {r['host_s'] * 1e3:.3f} ms"
            for r in ours
        ]
        if name == "step":
            speeds = [r for r in numbers(records, "step") if r["name"] == "speed" and r["item"].startswith("0.6b")]
            said = [f"{r['item']}: {shown(r)}" for r in speeds]
        yield mark, "; ".join(said) or "not timed"


def lost_rows(records: Sequence[Record]) -> Iterable[Sequence[str]]:
    """A row for each reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for r in of(records, "not run"):
        groups.setdefault((r["part"], r["why"]), []).append(r["what"])
    for (part, why), what in groups.items():
        yield part, "; ".join(what), why


def fastest_by_width(rows: Iterable[Record]) -> list[Record]:
    best: dict[int, Record] = {}
    for r in rows:
        if r["width"] not in best or r["both_s"] < best[r["width"]]["both_s"]:
            best[r["width"]] = r
    return list(best.values())


def number_rows(records: Sequence[Record], part: str) -> Iterable[Sequence[str]]:
    for r in numbers(records, part):
        aim = ""
        if r.get("aim") is not None:
            aim = f"{shown(r | {'value': r['aim']})} {'✓' if r['holds'] else '**missed**'}"
        elif r.get("planned") is not None:
            aim = f"planned {r['planned'] / 1e9:.2f} GB"
        yield r["item"], r["name"], shown(r), aim, r.get("note", "")


def shown(record: Record) -> str:
    """A value with its unit, as people read it.

    >>> shown({"value": 2.5e12, "unit": "bytes/s"}), shown({"value": 0.512, "unit": "share"}), shown({"value": None, "unit": "s"})
    ('2.50 TB/s', '51.2 %', 'not measured')
    """
    value, unit = record["value"], record["unit"]
    if value is None:
        return "not measured"
    if isinstance(value, str | bool):
        return str(value)
    for short, long, divisor in UNITS:
        if unit == long:
            return f"{value / divisor:.2f} {short}" if value / divisor >= 0.01 else f"{value:,.4g} {unit}"
    if unit.startswith("share"):
        return f"{value:.1%}{unit.removeprefix('share')}".replace("%", " %")
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"
    return (
        f"{value:,.4g} {unit}".strip() if isinstance(value, float) and value < 100 else f"{value:,.0f} {unit}".strip()
    )


def of(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def numbers(records: Iterable[Record], part: str) -> list[Record]:
    return [record for record in of(records, "number") if record["part"] == part]


def first(records: Iterable[Record], kind: str) -> Record:
    return next(iter(of(records, kind)), {})
