"""The table of what was found. Pure: the JSON document in, Markdown out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NONE = "–"
OURS, THEIRS, TRIGRAM = "factory", "transformers", "byte trigram"


def markdown(found: Mapping[str, Any]) -> str:
    """The first line says the machine and the command."""
    machine, model = found["machine"], found["model"]
    lines = [
        f"{machine['name']} ({machine['processor']}, {machine['threads']} threads), torch {machine['torch']}, commit `{found['commit']}`: "
        f"`{found['command']}`",
        "",
        f"| what | {OURS} | {THEIRS} | {TRIGRAM} |",
        "|---|--:|--:|--:|",
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
    """A list of four cells a row: what, the factory's, transformers', the trigram's."""
    model, both = found["model"], [found["trained"][name] for name in (OURS, THEIRS)]
    made = [
        [f"training step, tokens/s in {model['precision']}", *(f"{one['tokens_per_s']:,.0f}" for one in both), NONE]
    ]
    for name, peak in found["matmul_flops_per_s"].items():
        shares = [one["tokens_per_s"] * model["flops_per_token"] / peak for one in both]
        made.append(
            [
                f"its share of this machine's {name} matmul, {peak / 1e9:,.0f} GFLOP/s",
                *(f"{share:.1%}" for share in shares),
                NONE,
            ]
        )
    bits = found["bits_per_byte"]
    for domain, size in found["held_out"].items():
        what = f"held-out bits per byte, {domain} ({size['documents']} documents)"
        made.append([what, *(f"{bits[name][domain]:.3f}" for name in (OURS, THEIRS, TRIGRAM))])
    made.append(
        ["held-out bits per byte, all bytes", *(f"{bits[name]['all']:.3f}" for name in (OURS, THEIRS, TRIGRAM))]
    )
    made.append(["training, from its start to an export, s", *(f"{one['seconds']:.0f}" for one in both), NONE])
    made.append(["training, core-hours", *(f"{one['core_seconds'] / 3600:.3f}" for one in both), NONE])
    hours = [1e9 / one["tokens_per_s"] / 3600 for one in both]
    made.append(
        [
            "a billion tokens at that rate, core-hours",
            *(f"{one * found['machine']['threads']:,.0f}" for one in hours),
            NONE,
        ]
    )
    price = found["price"]
    if price:
        cells = [f"{one * price['per_hour']:,.2f}" for one in hours]
        made.append([f"a billion tokens, at {price['per_hour']:g} an hour ({price['source']})", *cells, NONE])
    seconds = [one["seconds"] for one in found["shard_to_verdict"]]
    made.append(["from a shard's ingest to its verdict, s", between(seconds), NONE, NONE])
    sizes = found["disk"]
    made.append(["disk: packages of `make setup`, GB", f"{sizes['setup_bytes'] / 1e9:.2f}", NONE, NONE])
    clone = sizes["clone"]
    said = f"{(clone['files_bytes'] + clone['history_bytes']) / 1e6:.1f}" if clone else NONE
    made.append(["disk: a clone with its history, MB", said, NONE, NONE])
    return made


def notes(found: Mapping[str, Any]) -> list[str]:
    """What a reader must know of the rows, a sentence or two each."""
    ours, check, gap = found["trained"][OURS], found["first_loss"], found["difference"]
    said = [
        f"Both models trained on the same {ours['tokens']:,} tokens ({ours['supervised']:,} carry loss) in the same order, at the same rates, "
        f"with AdamW. Each has its own initialisation. From the same weights the first loss is {check[OURS]:.6f} here and {check[THEIRS]:.6f} "
        f"in {THEIRS}.",
        f"{OURS} − {THEIRS}: {signed(gap['bits'])} bits per byte, mean of the domains"
        + (
            f", 95 % between {signed(gap['low'])} and {signed(gap['high'])} over other documents"
            if gap["low"] is not None
            else ""
        )
        + ". That is of one training each, and says nothing of other seeds. One evaluator measured both, on the dev half of what is held out.",
        f"{THEIRS}' step hides documents from one another by a mask, as the factory's does. "
        "`benchmarks/training/test_training_step.py` times it without one, which is its fastest way.",
        "A share counts 6 FLOPs a weight and token and attention's causal half. The matmul rate is that of threads that wait for nothing; "
        "steps are wall-clock time, so that other work on the machine lowers the share.",
    ]
    judged = found["shard_to_verdict"]
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
    said.append("Energy: not measured. Core-hours are CPU time of all threads, with compiling.")
    return said


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
