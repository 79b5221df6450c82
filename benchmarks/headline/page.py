"""The table of what was found. Pure: the JSON document in, Markdown out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

NONE = "–"
OURS, THEIRS, FROM_OURS, TRIGRAM = "factory", "transformers", "transformers from the factory's weights", "byte trigram"
MEASURED = (OURS, THEIRS, FROM_OURS, TRIGRAM)


def markdown(found: Mapping[str, Any]) -> str:
    """The first line says the machine and the command."""
    machine, model = found["machine"], found["model"]
    lines = [
        f"{machine['name']} ({machine['processor']}, {machine['threads']} threads), torch {machine['torch']}, commit `{found['commit']}`: "
        f"`{found['command']}`",
        "",
        f"| what | {' | '.join(MEASURED)} |",
        "|---|--:|--:|--:|--:|",
        *(f"| {' | '.join(row)} |" for row in rows(found)),
        "",
    ]
    lines += [
        f"Model: {model['parameters'] / 1e6:.2f} M weights, {model['layers']} layers of width {model['width']}, vocabulary {model['vocabulary']:,}; "
        f"{model['steps']} steps of {model['tokens_per_step']:,} positions in {model['precision']}.",
        "",
        *(f"* {note}" for note in notes(found)),
    ]
    return "\n".join(lines) + "\n"


def rows(found: Mapping[str, Any]) -> list[list[str]]:
    """Cells, a list a row: what it is, and what it is of each of ``MEASURED``."""
    model, price, disk = found["model"], found["price"], found["disk"]
    rates = {name: model["tokens_per_step"] / min(seconds) for name, seconds in found["step_seconds"].items()}

    def row(what: str, **cells: str) -> list[str]:
        return [what, *(cells.get(name, NONE) for name in ("ours", "theirs", "from_ours", "trigram"))]

    def of_rates(what: str, form: str, times: float, inverse: bool = False) -> list[str]:
        ours, theirs = (format(times / rates[n] if inverse else times * rates[n], form) for n in (OURS, THEIRS))
        return row(what, ours=ours, theirs=theirs)

    made = [of_rates(f"training step, tokens/s in {model['precision']}", ",.0f", 1)]
    for name, peak in found["matmul_flops_per_s"].items():
        what = f"its share of what {name} matrix products alone reach here, {peak / 1e9:,.0f} GFLOP/s"
        made.append(of_rates(what, ".1%", model["flops_per_token"] / peak))
    bits = found["bits_per_byte"]
    for domain, size in [*found["held_out"].items(), ("all", None)]:
        what = f"held-out bits per byte, {domain} " + (f"({size['documents']} documents)" if size else "bytes together")
        made.append([what, *(f"{mean(bits[name], domain):.3f}" for name in MEASURED)])
    hours = 1e9 / 3600
    made.append(of_rates("a billion tokens, core-hours", ",.0f", hours * found["machine"]["threads"], inverse=True))
    if price:
        what = f"a billion tokens, at {price['per_hour']:g} an hour ({price['source']})"
        made.append(of_rates(what, ",.2f", hours * price["per_hour"], inverse=True))
    seconds = [one["seconds"] for one in found["shard_to_verdict"]]
    made.append(row("from a shard's ingest to its verdict, s", ours=between(seconds)))
    made.append(row("disk: packages of `make setup`, GB", ours=f"{disk['setup_bytes'] / 1e9:.2f}"))
    if disk["clone"]:
        whole = sum(disk["clone"].values())
        made.append(row("disk: a clone with its history, MB", ours=f"{whole / 1e6:.1f}"))
    return made


def notes(found: Mapping[str, Any]) -> list[str]:
    """What a reader must know of the rows, a sentence or two each."""
    trained, seconds, judged = found["trained"], found["step_seconds"], found["shard_to_verdict"]
    ours, bits, size = trained[OURS], found["bits_per_byte"], found["model"]["tokens_per_step"]
    middle = " and ".join(f"{size / statistics.median(seconds[name]):,.0f} ({name})" for name in (OURS, THEIRS))
    pairs = ", ".join(f"{a['losses'][0]:.4f} and {b['losses'][0]:.4f}" for a, b in zip(ours, trained[FROM_OURS]))
    count = f"{len(ours)} seeds" if len(ours) > 1 else "one seed, so that nothing is known of others"
    said = [
        f"Speed: the fastest of {len(seconds[OURS])} steps of each, which took turns. At the median step it was {middle}. The load of the machine "
        f"was {found['load_before']:.1f} before the start: other work makes steps slower, and the matrix products, in CPU time, hardly. A share "
        "counts 6 FLOPs a weight and token, and attention's causal half.",
        f"Both hide documents of a row from one another. {THEIRS} is compiled, and does so by a mask; its fastest way, without one, is timed in "
        "`benchmarks/training/test_training_step.py`.",
        f"Quality: the mean of {count}. Of a seed all trained on the same {ours[0]['tokens']:,} tokens ({ours[0]['supervised']:,} carry loss) in the "
        f"same order, at the same rates (peak {found['model']['lr']:g}), with AdamW; the first two from their own initialisation. One evaluator "
        "measured all, on the dev half of what is held out.",
        f"The factory's first weights have the same first loss in both: {pairs}.",
    ]
    for name in (THEIRS, FROM_OURS):
        gaps = [one["all"] - other["all"] for one, other in zip(bits[OURS], bits[name])]
        said.append(f"{OURS} − {name}, all bytes together, by seed: {', '.join(map(signed, gaps))} bits per byte.")
    each = lambda ones, key: statistics.mean(one[key] for one in ones)
    spent = ", ".join(
        f"{each(ones, 'seconds'):.0f} s and {each(ones, 'core_seconds') / 3600:.3f} core-hours ({name})"
        for name, ones in trained.items()
    )
    said.append(f"One training to its export took {spent}, with compiling. Energy was not measured.")
    if judged:
        names = ", ".join(f"{one['shard']} {one['seconds']:.0f} s" for one in judged)
        said.append(
            f"Shard to verdict, from the ledger of a demo: {names}, each from the moment that its ingest was recorded to the verdict on "
            f"candidate {judged[0]['candidate']} ({judged[0]['outcome']}). Between them lie training, evaluation and the gate."
        )
    else:
        said.append(f"Shard to verdict: {found['no_verdict']}")
    if not found["price"]:
        said.append("Price: not stated; `--price-per-hour` with `--price-source` adds it.")
    return said


def mean(of_seeds: Sequence[Mapping[str, float]], domain: str) -> float:
    return statistics.mean(one[domain] for one in of_seeds)


def between(seconds: list[float]) -> str:
    """
    >>> between([61.2, 70.4]), between([5.0]), between([])
    ('61 to 70', '5', '–')
    """
    ends = sorted({f"{one:.0f}" for one in (min(seconds), max(seconds))}, key=float) if seconds else [NONE]
    return " to ".join(ends)


def signed(value: float) -> str:
    """
    >>> signed(-0.0312), signed(0.5)
    ('−0.031', '+0.500')
    """
    return f"{value:+.3f}".replace("-", "−")
