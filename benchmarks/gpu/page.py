"""The report of a run's records: ``markdown`` for people, ``document`` as JSON. Pure: records in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.gpu import aims
from benchmarks.gpu.headline import busy_of, falls_back, headline, is_right, judged_of, of, unfinished, unjudged
from benchmarks.gpu.needs import NEED_PYDANTIC
from benchmarks.gpu.winners import Decision, Verdict, decisions, verdicts
from kernels.contract.choice import split_implementation_names

Record = dict[str, Any]
FORMAT = 2
UNITS = (("TB/s", "bytes/s", 1e12), ("TFLOP/s", "FLOP/s", 1e12), ("GB", "bytes", 1e9))


def document(records: Sequence[Record]) -> dict[str, Any]:
    """Everything, by part, with what follows from it. Every number has its unit, or a name that ends with one (``_s``: seconds). ``right``:
    null where nothing was judged."""
    run = first(records, "run")
    return {
        "format": FORMAT,
        "label": run.get("label", ""),
        "headline": headline(records),
        "right": is_right(records),
        "none_run": judged_of(records).none_run,
        "unfinished": unfinished(records),
        "busy": busy_of(records),
        "run": run,
        "facts": {r["name"]: {"value": r["value"], "unit": r["unit"]} for r in numbers(records, "facts")},
        "parts": of(records, "part"),
        "wrong": of(records, "wrong"),
        "failed": of(records, "failed"),
        "judged": of(records, "judged"),
        "timed": of(records, "timed"),
        "decisions": [asdict(decision) for decision in decided(records)],
        "keep_or_replace": [verdict.to_json() for verdict in verdicts_of(records)],
        "computing": of(records, "computing"),
        "looks": of(records, "look"),
        "end": first(records, "end"),
        "numbers": [r for r in of(records, "number") if r["part"] != "facts"],
        "not_run": of(records, "not run"),
        "items": of(records, "ended"),
    }


def dry(records: Sequence[Record]) -> bool:
    """Then nothing is compared: no verdict, no aim, no published mark."""
    return bool(first(records, "run").get("dry"))


def verdicts_of(records: Sequence[Record]) -> list[Verdict]:
    return [] if dry(records) else verdicts(of(records, "timed"), of(records, "failed"))


def decided(records: Sequence[Record]) -> list[Decision]:
    machine = next((str(r["value"]) for r in numbers(records, "facts") if r["name"] == "class"), "cuda")
    return [] if dry(records) else decisions(of(records, "timed"), of(records, "failed"), machine)


def markdown(records: Sequence[Record]) -> str:
    run, facts = first(records, "run"), {r["name"]: r for r in numbers(records, "facts")}
    said = lambda name: shown(facts[name]) if name in facts else "not known"
    label = f"**{run['label']}**\n\n" if run.get("label") else ""
    cut = [r for r in of(records, "part") if r["state"] == "cut"]
    lines = [
        f"# {'DRY RUN: ' * dry(records)}{said('card')}",
        "",
        f"{label}**{headline(records)}**",
        "",
        f"Made by `{run.get('command', '')}` at {run.get('began', '')}, commit `{said('commit')}`, limit {run.get('limit_s', 0) / 60:.1f} minutes.",
        *notes(records),
        *(
            line
            for r in cut
            for line in ("", f"**Cut {r['why']} in the part '{r['part']}': what follows is what there was by then.**")
        ),
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
            ("op", "implementation", "right", "wrong", "skipped", "not reached", "s"),
            right_rows(records),
            "llrrrrr",
            RIGHT,
        ),
        *section("## Fast", FAST_COLUMNS, fast_rows(records), "lrlllrrrrrl", FAST),
        *([] if dry(records) else section("## Verdict", VERDICT_COLUMNS, verdict_rows(records), "", KEEP)),
        *([] if dry(records) else section("## Published marks", ("mark", "ours here"), mark_rows(records), "ll")),
        *section("## Step", ("item", "what", "value", "aim", "note"), number_rows(records, "step"), "llrll", STEP),
        *section("## Chain", ("item", "what", "value", "aim", "note"), number_rows(records, "chain"), "llrll"),
        *section("## Not run", ("part", "what", "why"), lost_rows(records), "lll"),
    ]
    return "\n".join(lines) + "\n"


RIGHT = (
    "Against the reference in fp64 on the same device: every output and every gradient, at most twice eager's error at the same dtype, and "
    "finite wherever eager is. The reference itself is what others are measured by. *skipped*: another implementation computes instead, the memory "
    "is too small, or none of that size runs; *Not run* says which."
)
FAST = (
    "Milliseconds of the forward pass and of forward and backward, by device events: the median. `floor` is the share of what the card can do at "
    "best: of the copy bandwidth or of the product rate above, whichever binds. `host` is the time until the host may go on. The winner is **bold**, "
    "of what was found right in this run; a rival whose note says that it computes something else cannot win, and is named in the verdict where it "
    "is faster."
)
KEEP = (
    "What `auto` runs on this card before anything was tuned, beside the fastest registered implementation that was found right in this run, "
    "over the widths, by the device's time. A change: where it is faster at every width by more than the spread "
    "(quartiles). The last column, by the device's time alone: ours beside all others."
)
VERDICT_COLUMNS = ("op", "shipped untuned", "fastest", "change?", "why", "where", "by width")
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
        wrong, left = f"**{len(r['wrong'])}**" if r["wrong"] else "0", len(r["not_reached"])
        skipped = r["checks"] - r["right"] - len(r["wrong"]) - left
        yield r["op"], r["implementation"], r["right"], wrong, skipped, left, f"{r['seconds']:.1f}"
    crashed = {r["item"] for r in of(records, "wrong")}
    for name in unjudged(records):
        op, _, implementation = name.partition("/")
        yield op, implementation, "**none**", "**crashed**" if name in crashed else "–", "–", "all", "–"


def fast_rows(records: Sequence[Record]) -> Iterable[Sequence[str]]:
    best = {(v.op, v.width): v.winner for v in verdicts_of(records)}
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
            "; ".join(
                filter(None, ["**wrong: not compared**" if r["wrong"] else "", r["note"], waited(r.get("waits", []))])
            ),
        )


def waited(where: Sequence[str]) -> str:
    """
    >>> waited(["kernels/adamw/triton.py:120 adamw"] * 2)
    'waits for the device 2 times, first at kernels/adamw/triton.py:120 adamw'
    """
    return f"waits for the device {len(where)} times, first at {where[0]}" if where else ""


def verdict_rows(records: Sequence[Record]) -> Iterable[Sequence[Any]]:
    by_width: dict[str, list[str]] = {}
    for verdict in sorted(verdicts_of(records), key=lambda verdict: verdict.width):
        by_width.setdefault(verdict.op, []).append(f"{verdict.width}: {verdict}")
    for one in decided(records):
        change = f"**{one.change}**" if one.change == "yes" else one.change
        yield one.op, one.shipped, one.fastest or "–", change, one.why, one.where, ". ".join(by_width[one.op])


def mark_rows(records: Sequence[Record]) -> Iterable[Sequence[str]]:
    timed = of(records, "timed")
    for name, mark in aims.PUBLISHED:
        ours = fastest_by_width(r for r in timed if r["op"] == name and r["side"] == "ours" and not r["wrong"])
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
        if r["name"] == "first step, cold" and (kernels := kernels_of(records, r["item"])):
            yield kernels
        aim = ""
        if dry(records):
            pass
        elif r.get("aim") is not None:
            aim = f"{shown(r | {'value': r['aim']})} {'✓' if r['holds'] else '**missed**'}"
        elif r.get("planned") is not None:
            aim = f"planned {r['planned'] / 1e9:.2f} GB"
        yield r["item"], r["name"], shown(r), aim, r.get("note", "")


def kernels_of(records: Sequence[Record], item: str) -> Sequence[str]:
    """The row of what computed each op in a step; another than the first that was chosen is bold. Empty: not known."""
    every = [r for r in of(records, "computing") if r["item"] == item]
    if not every:
        return ()
    said = [
        f"**{r['op']}: {r['by'] or 'nothing'}, for {split_implementation_names(r['chosen'])[0]}**"
        if falls_back(r)
        else f"{r['op']}: {r['by']}"
        for r in every
    ]
    return item, "computed by", ", ".join(said), "", "; ".join(f"{r['op']}: {r['why']}" for r in every if r["why"])


def notes(records: Sequence[Record]) -> list[str]:
    """Of the whole run, a paragraph each: what makes the rest worth less, and what lies around it."""
    run, end = first(records, "run"), first(records, "end")
    said = []
    if left := unfinished(records):
        said.append(f"**{left[0].upper()}{left[1:]}.**")
    if planted := run.get("planted"):
        said.append(f"**Broken on purpose, for a test: `{planted}` was planted.**")
    said += [f"**{r['what']} did not run: {r['why']}**" for r in of(records, "not run") if r["what"] == NEED_PYDANTIC]
    if busy := busy_of(records):
        said.append(f"**The card was busy: {busy}. No time below is its own.**")
    if looks := of(records, "look"):
        said.append(
            "Clock, power and temperature (nvidia-smi, while nothing of the run was on the card): "
            + looked(looks)
            + "."
        )
    if end.get("replaces"):
        said.append(f"Replaces {end['replaces']}.")
    return [line for paragraph in said for line in ("", paragraph)]


def looked(looks: Sequence[Record]) -> str:
    figure = lambda value, unit: f"{value:.0f} {unit}" if isinstance(value, float) else f"– {unit}"
    return "; ".join(
        f"{r['when']} '{r['part']}' {figure(r['clock'], 'MHz')}, {figure(r['power'], 'W')}, {figure(r['temperature'], '°C')}"
        for r in looks
    )


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


def numbers(records: Iterable[Record], part: str) -> list[Record]:
    return [record for record in of(records, "number") if record["part"] == part]


def first(records: Iterable[Record], kind: str) -> Record:
    return next(iter(of(records, kind)), {})
