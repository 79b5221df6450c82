"""``python -m benchmarks.peers``: tokens/s and memory of continuing a model, beside transformers' Trainer and TRL's SFTTrainer."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.headline.__main__ import Parser, Refused, commit, positive, whole
from benchmarks.peers.page import compare, markdown
from benchmarks.peers.side import OURS, SFT, TRAINER, Measured, Side
from benchmarks.peers.work import SHAPES, Work

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "accelerate", "trl")
SAME_FIRST, SAME_LATER = 1e-3, 2e-2  # nats: of the first step's loss, and of any later one's
PASSIVE = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}  # a thread that waits takes no processor time
MORE = """
what is measured
  The sides continue from the same weights on the same packed rows, in the same order, with AdamW, the same rate and the same clipping:
    factory     the loop of 'python -m trainer', with the kernels that tuning chooses here
    Trainer     of transformers: fused AdamW, eager and compiled
    SFTTrainer  of TRL (pip install trl; not among this project's dependencies; without it this side is left out), without recomputation
  Each runs in a process of its own, and the sides take turns. Documents of a row do not see one another in any of them, unless --plain
  adds the others' faster path, in which they do. The first losses must agree to 1e-3, later ones to 2e-2.

  wall       tokens a second, of the median step after the first
  processor  tokens a second of processor time of all threads, which other work on the machine disturbs less
  memory     the peak of resident memory while loading, in the first step (which compiles), in later steps and while saving

exit codes
  0  done    1  a side failed, or the sides do not train the same thing    2  a word of the command line is wrong    130  Ctrl-C

examples
  python -m benchmarks.peers                                           SmolLM2-135M's shape; about an hour on two idle cores
  python -m benchmarks.peers --shape tiny --context 64 --steps 3 --rounds 1 --no-compile --out /tmp/look
  ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python -m benchmarks.peers --precision fp32
"""


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="python -m benchmarks.peers",
        description="Tokens/s and memory of continuing a model, beside transformers' Trainer and TRL's SFTTrainer.",
        epilog=MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--shape", choices=sorted(SHAPES), default="smollm2-135m", help="(default: smollm2-135m)")
    made.add_argument(
        "--context", type=whole(8), nargs="+", default=[512, 1024], help="tokens of a row (default: 512 1024)"
    )
    made.add_argument(
        "--tokens", type=whole(8), default=2048, help="of a step; a multiple of each context (default: 2048)"
    )
    made.add_argument(
        "--precision", choices=("fp32", "bf16"), nargs="+", default=["bf16", "fp32"], help="(default: both)"
    )
    made.add_argument("--steps", type=whole(2), default=5, help="of each training; the first is not timed (default: 5)")
    made.add_argument("--rounds", type=whole(1), default=2, help="how often each side trains (default: 2)")
    made.add_argument("--lr", type=positive, default=3e-4, help="of all (default: 0.0003)")
    made.add_argument("--micro", type=whole(1), help="rows of one forward and backward pass of all (default: all rows)")
    made.add_argument("--layers", type=whole(1), help="instead of the shape's own, where compiling all takes too long")
    made.add_argument("--only", choices=(TRAINER, SFT), help="of the others, this one alone")
    made.add_argument("--note", default="", help="a sentence for the report: what else the machine did")
    made.add_argument("--eager-others", action="store_true", help="leave out torch.compile of the others alone")
    made.add_argument("--no-compile", action="store_true", help="leave out torch.compile, in ours too")
    made.add_argument("--plain", action="store_true", help="also the others with documents that see one another")
    made.add_argument("--kernels", type=Path, help="a kernels.yaml for ours (default: what tuning chooses here)")
    made.add_argument(
        "--add",
        action="store_true",
        help="keep the report's other measurements, if they are of this machine and these versions",
    )
    made.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder (default: benchmarks/results)"
    )
    return made


def checked(words: list[str] | None) -> argparse.Namespace:
    """Raises: Refused."""
    chosen = parser().parse_args(words)
    for context in chosen.context:
        if chosen.tokens % context:
            raise Refused(
                f"--tokens {chosen.tokens}: expected a multiple of each --context; {context} does not divide it"
            )
        if chosen.micro and chosen.tokens // context % chosen.micro:
            rows = chosen.tokens // context
            raise Refused(
                f"--micro {chosen.micro}: expected a divisor of the rows of a step, which are {rows} at context {context}"
            )
    if chosen.kernels is not None and not chosen.kernels.is_file():
        raise Refused(f"--kernels {chosen.kernels}: there is no such file")
    return chosen


def list_sides(chosen: argparse.Namespace, with_sft: bool) -> list[Side]:
    compiled = [False] if chosen.no_compile or chosen.eager_others else [True, False]
    seen = [True, False] if chosen.plain else [True]
    theirs = [
        Side(name, how, hidden, chosen.micro)
        for name in (TRAINER, *([SFT] if with_sft else []))
        if chosen.only in (None, name)
        for how in compiled
        for hidden in seen
    ]
    return [Side(OURS, not chosen.no_compile, micro=chosen.micro), *theirs]


def train_once(folder: Path, side: Side, kernels: Path) -> Measured:
    """One training in a process of its own. Raises: Failed, with the end of what it said."""
    with tempfile.TemporaryDirectory(prefix="out-", dir=folder) as out:
        words = [
            sys.executable,
            "-m",
            "benchmarks.peers.side",
            str(folder),
            out,
            json.dumps(asdict(side)),
            str(kernels),
        ]
        there = os.environ | PASSIVE | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(words, cwd=ROOT, env=there, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise Failed(f"{side} failed with exit code {done.returncode}:\n{done.stdout[-2000:]}")
        return Measured(**json.loads((Path(out) / "measured.json").read_text()))


def has_trl() -> bool:
    return importlib.util.find_spec("trl") is not None


class Failed(Exception):
    """A side failed, or computes another function."""


def refuse_other_function(measured: dict[Side, Measured]) -> None:
    """Raises: Failed unless all sides that hide documents from one another have the same losses as ours."""
    ours = next(one.losses for side, one in measured.items() if side.name == OURS)
    for side, one in measured.items():
        gaps = [abs(a - b) for a, b in zip(ours, one.losses, strict=True)]
        if side.hidden and (gaps[0] > SAME_FIRST or max(gaps) > SAME_LATER):
            raise Failed(f"{side} has other losses than ours, {one.losses} and {ours}: nothing is compared")


def measure(chosen: argparse.Namespace, work: Work, sides: list[Side], folder: Path) -> Iterator[dict[str, Any]]:
    """The rounds of one context and precision until now, after each round, as JSON values. Raises: Failed."""
    from benchmarks.support.best_here import tuned_kernels

    say(f"context {work.context}, {work.precision}: writing weights and rows")
    words = [sys.executable, "-m", "benchmarks.peers.preparing", str(folder), json.dumps(asdict(work))]
    subprocess.run(words, cwd=ROOT, check=True)
    kernels = chosen.kernels or tuned_kernels(work.recipe(not chosen.no_compile, chosen.micro))
    rounds: list[dict[Side, Measured]] = []
    for number in range(chosen.rounds):
        rounds.append({})
        for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
            say(f"  round {number + 1} of {chosen.rounds}: {side}")
            rounds[-1][side] = train_once(folder, side, kernels)
        refuse_other_function(rounds[-1])
        yield {
            "work": asdict(work),
            "kernels": Path(kernels).read_text(),
            "sides": [
                {"side": asdict(side), "name": str(side), "rounds": [asdict(one[side]) for one in rounds]}
                for side in sides
            ],
            "commit": commit(),
            "load": os.getloadavg()[1],
            "note": chosen.note,
        }


def main(words: list[str] | None = None) -> int:
    try:
        chosen = checked(words)
        with_sft = has_trl()
        if not with_sft:
            say(f"{SFT} is left out, because TRL is not installed here: pip install trl")
        sides, document = list_sides(chosen, with_sft), describe()
        path = chosen.out / f"peers-{document['machine']['name']}.json"
        document |= {"left_out": [] if with_sft else [SFT], "found": read_kept(path, document) if chosen.add else []}
        for context in chosen.context:
            for precision in chosen.precision:
                work = Work(
                    chosen.shape,
                    context,
                    chosen.tokens // context,
                    chosen.steps,
                    precision,
                    chosen.lr,
                    layers=chosen.layers,
                )
                with tempfile.TemporaryDirectory(prefix="peers-") as folder:
                    for found in measure(chosen, work, sides, Path(folder)):
                        write(path, document, found)
    except Refused as refusal:
        say(str(refusal))
        return 2
    except KeyboardInterrupt:
        say("interrupted; the rounds that were done are in the report")
        return 130
    except (Failed, subprocess.CalledProcessError) as error:
        say(str(error))
        return 1
    print(markdown(document), end="")
    return 0


def read_kept(path: Path, document: dict[str, Any]) -> list[Any]:
    """The measurements of the report that is there; none if there is none. Raises: Refused unless they are of this machine and these versions."""
    if not path.is_file():
        return []
    there = json.loads(path.read_text())
    other = [key for key in ("machine", "versions", "capability") if there[key] != document[key]]
    if other:
        raise Refused(
            f"--add: {path.name} has another {other[0]}, {there[other[0]]}; measure everything anew, without --add"
        )
    of_all = {key: there[key] for key in ("commit", "load", "note") if key in there}  # of reports before 2026-11-28
    return [of_all | one for one in there["found"]]


def write(path: Path, document: dict[str, Any], found: dict[str, Any]) -> None:
    """Put a measurement into the document, in the place of one of the same work and sides, and write the report."""
    key = lambda one: (one["work"], [side["side"] for side in one["sides"]])
    document["found"] = [*(one for one in document["found"] if key(one) != key(found)), found]
    document["ratios"] = [compare(one) for one in document["found"]]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(document))


def describe() -> dict[str, Any]:
    """The machine and the versions. Where ATEN_CPU_CAPABILITY lets torch use less than the processor has, the machine's name says so."""
    from importlib.metadata import version

    from kernels.contract.machine import describe_this_machine

    machine, capability = describe_this_machine("cpu").to_json(), os.environ.get("ATEN_CPU_CAPABILITY", "")
    there = [name for name in PACKAGES if importlib.util.find_spec(name)]
    return {
        "machine": machine | {"name": f"{machine['name']}-emulated"} if capability else machine,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in there},
        "capability": capability,
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
