"""``python -m benchmarks.gpu``: eight minutes on one card, and a table that can be committed."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from benchmarks.gpu import page
from benchmarks.gpu.parts import NAMES, PARTS, PLANT, Settings
from benchmarks.gpu.records import Record, read
from benchmarks.gpu.session import ROOT, Session, dry_folder

MORE = """
what comes out
  <out>/<card>-<commit>[-changed][-partial].md and .json    the tables, to be committed; written again after each part. -changed: of a tree
                       that is not that commit. -partial: not all parts were done; only a report of all of them replaces an older one
  the same .jsonl      one line a finding, as it comes: what is left of a run that was killed (--render makes the tables of it)
  the same .log        what the libraries printed

exit codes
  0  right as far as it went    1  a result is wrong, or one of our kernels fails: the first line of the report says which
  2  nothing could run (no device; --dry runs all of it, in miniature, on a CPU)    3  nothing was judged    130, 143  cut by Ctrl-C, SIGTERM

examples
  python -m benchmarks.gpu                          all of it, in eight minutes at most
  python -m benchmarks.gpu --parts right --minutes 2
  python -m benchmarks.gpu --dry --out /tmp/look    no GPU needed; tells nothing of speed
"""


class Refused(Exception):
    """A word of the command line, in one line."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(message.removeprefix("argument "))


def number(least: float, exclusive: bool = False) -> Callable[[str], float]:
    """A type of argparse: a finite number, at least so large (``exclusive``: larger)."""

    def read_number(word: str) -> float:
        bound = f"{'more than' if exclusive else 'at least'} {least:g}"
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < least or exclusive and value == least:
            raise argparse.ArgumentTypeError(f"expected a number, {bound}; got {word!r}")
        return value

    return read_number


def parts_of(words: str) -> list[str]:
    """Of the command line, in the order in which they run."""
    named = {name.strip() for name in words.split(",") if name.strip()}
    if not named:
        raise argparse.ArgumentTypeError(f"names no part; there are: {', '.join(NAMES)}")
    if unknown := sorted(named - set(NAMES)):
        raise argparse.ArgumentTypeError(
            f"there is no part {', '.join(map(repr, unknown))}; there are: {', '.join(NAMES)}"
        )
    return [name for name in NAMES if name in named]


def device_of(word: str) -> str:
    kind, _, which = word.partition(":")
    if kind != "cuda" or which and not which.isdigit():
        raise argparse.ArgumentTypeError(f"{word!r} is no CUDA device; without one, --dry runs on a CPU")
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if visible and which and int(which) >= len(visible):
        there = ", ".join(f"cuda:{count}" for count in range(len(visible)))
        raise argparse.ArgumentTypeError(f"CUDA_VISIBLE_DEVICES has no {word}; there are: {there}")
    return word


def writable(out: Path) -> None:
    """Raises: Refused, before anything was measured."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise Refused(f"--out: {out}: no files can be written there: {error.strerror}") from None


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="python -m benchmarks.gpu",
        description="Is this repository right on this card, and how fast? Needs torch and triton; the parts 'step' and 'chain' also pydantic.",
        epilog="parts, in order\n" + "\n".join(f"  {part.name:<8} {part.about}" for part in PARTS) + "\n" + MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--out", type=Path, help="folder of the results (benchmarks/results; with --dry a new temporary one)"
    )
    made.add_argument(
        "--parts",
        type=parts_of,
        default=list(NAMES),
        help="only these, with commas between them; 'facts' always runs (default: all)",
    )
    made.add_argument(
        "--minutes", type=number(1), default=8.0, help="the most that all of it takes, at least 1 (default: 8)"
    )
    made.add_argument("--device", type=device_of, default="cuda", help="cuda or cuda:N (default: cuda, the first)")
    made.add_argument(
        "--memory", type=number(0, exclusive=True), metavar="GB", help="of the device, at most (default: what is free)"
    )
    made.add_argument("--commit", default="", help="of this code, where there is no git to ask")
    made.add_argument(
        "--dry",
        action="store_true",
        help="the same code on a CPU, tiny: Triton's interpreter, nothing compiled, wall clock",
    )
    made.add_argument("--json", action="store_true", help="print the JSON document at the end instead of the report")
    made.add_argument("--render", type=Path, metavar="JSONL", help="run nothing: print the report of a run's lines")
    return made


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    try:
        chosen = parser().parse_args(arguments)
        if chosen.render:
            return rendered(chosen.render, chosen.json)
        if os.environ.get(PLANT) and not chosen.dry:
            raise Refused(f"{PLANT} is set, which breaks kernels on purpose: it is for --dry alone")
        out = chosen.out or (dry_folder() if chosen.dry else ROOT / "benchmarks" / "results")
        writable(out)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 2
    settings = Settings(
        "cpu" if chosen.dry else chosen.device,
        dry=chosen.dry,
        memory=chosen.memory * 1e9 if chosen.memory else None,
        commit=chosen.commit,
    )
    command = shlex.join(["python", "-m", "benchmarks.gpu", *without_out(words)])
    session = Session(settings, out, chosen.parts, 60 * chosen.minutes, command)
    code = session.run()
    if session.records.files:
        said(session.records.every, chosen.json)
        print(f"{session.records.markdown} and .json", file=sys.stderr)
    elif code != 2:
        print("cut before the card was known: there is no report", file=sys.stderr)
    return code


def without_out(words: list[str]) -> list[str]:
    """The command line for the report, which names no folder of this machine.

    >>> without_out(["--minutes", "6", "--out", "/tmp/look", "--out=x"])
    ['--minutes', '6']
    """
    kept, after = [], ""
    for word in words:
        if after != "--out" and word != "--out" and not word.startswith("--out="):
            kept.append(word)
        after = word
    return kept


def rendered(lines: Path, as_json: bool) -> int:
    """Raises: Refused."""
    try:
        said(read(lines), as_json)
    except OSError as error:
        raise Refused(f"--render: {lines}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Refused(f"--render: {lines}: {error}") from None
    return 0


def said(every: list[Record], as_json: bool) -> None:
    print(json.dumps(page.document(every), indent=1) if as_json else page.markdown(every), end="")


if __name__ == "__main__":
    sys.exit(main())
