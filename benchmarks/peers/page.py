"""The comparison and its table. Pure: the JSON document in, numbers and Markdown out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.peers.side import OURS, STAGES, WARM_UP

MIB = 1 << 20


def rates(side: Mapping[str, Any], tokens: int) -> dict[str, float]:
    """Tokens a second of wall time and of processor time: the median of all timed steps of all rounds."""
    timed = {
        key: [value for one in side["rounds"] for value in one[key][WARM_UP:]] for key in ("seconds", "core_seconds")
    }
    return {
        "wall": tokens / statistics.median(timed["seconds"]),
        "processor": tokens / statistics.median(timed["core_seconds"]),
    }


def peaks(side: Mapping[str, Any]) -> dict[str, float]:
    """MiB by stage: the smallest of the rounds, because other work never lowers a peak."""
    return {stage: min(one["peaks"][stage] for one in side["rounds"]) / MIB for stage in STAGES}


def compare(found: Mapping[str, Any]) -> dict[str, Any]:
    """Ours beside the fastest other, by processor time: ratios of speed, and of the peak of memory over all stages (above one: ours takes more).

    Each round has a ratio of its own, of the medians of its steps.
    """
    tokens = found["work"]["rows"] * found["work"]["context"]
    ours = next(side for side in found["sides"] if side["side"]["name"] == OURS)
    others = [side for side in found["sides"] if side is not ours]
    best = max(others, key=lambda side: rates(side, tokens)["processor"])
    mine, other = rates(ours, tokens), rates(best, tokens)
    by_round = [
        rates({"rounds": [a]}, tokens)["processor"] / rates({"rounds": [b]}, tokens)["processor"]
        for a, b in zip(ours["rounds"], best["rounds"], strict=True)
    ]
    return {
        "fastest_other": best["name"],
        "wall": mine["wall"] / other["wall"],
        "processor": mine["processor"] / other["processor"],
        "processor_by_round": by_round,
        "memory_of_steps": peaks(ours)["steps"] / peaks(best)["steps"],
        "memory": max(peaks(ours).values()) / max(peaks(best).values()),
    }


def markdown(document: Mapping[str, Any]) -> str:
    """The first line says the machine; then a table for each measurement."""
    machine = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    capability = f", ATEN_CPU_CAPABILITY={document['capability']}" if document["capability"] else ""
    lines = [
        f"{machine['name']} ({machine['processor']}, {machine['threads']} threads{capability}), {versions}: "
        "`python -m benchmarks.peers`",
        "",
    ]
    for found, ratio in zip(document["found"], document["ratios"], strict=True):
        said = [found["note"], ""] if found["note"] else []
        lines += [*table(found, ratio), "", *said]
    if document["left_out"]:
        lines += [f"Left out: {', '.join(document['left_out'])}, because TRL is not installed (`pip install trl`).", ""]
    return "\n".join(lines)


def table(found: Mapping[str, Any], ratio: Mapping[str, Any]) -> list[str]:
    work = found["work"]
    tokens = work["rows"] * work["context"]
    columns = [
        "side",
        "tokens/s",
        "tokens/s of processor time",
        *(f"{stage}, MiB" for stage in STAGES),
        "first loss",
        "last loss",
    ]
    fewer = f", {work['layers']} layers" if work["layers"] else ""
    when = f" (commit `{found['commit']}`, load {found['load']:.1f})"
    lines = [
        f"**{work['shape']}, context {work['context']}, {work['rows']} rows a step, {work['precision']}{fewer}**{when}",
        "",
        f"| {' | '.join(columns)} |",
        f"|---|{'--:|' * (len(columns) - 1)}",
    ]
    for side in found["sides"]:
        speed, memory, losses = rates(side, tokens), peaks(side), side["rounds"][0]["losses"]
        cells = [f"{speed['wall']:,.0f}", f"{speed['processor']:,.0f}", *(f"{memory[stage]:,.0f}" for stage in STAGES)]
        lines.append(f"| {' | '.join([side['name'], *cells, f'{losses[0]:.4f}', f'{losses[-1]:.4f}'])} |")
    rounds = ", ".join(f"{one:.2f}" for one in ratio["processor_by_round"])
    return [
        *lines,
        "",
        f"Beside the fastest other ({ratio['fastest_other']}): {ratio['processor']:.2f} times its tokens by processor time (by round: {rounds}), "
        f"{ratio['wall']:.2f} by the clock; {ratio['memory_of_steps']:.2f} of its memory in steps, {ratio['memory']:.2f} over all stages.",
    ]
