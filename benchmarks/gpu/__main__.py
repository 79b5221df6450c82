"""``python -m benchmarks.gpu``: eight minutes on one card, and a table that can be committed."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from benchmarks.gpu import page
from benchmarks.gpu.parts import NAMES, PARTS, Settings
from benchmarks.gpu.records import read
from benchmarks.gpu.session import ROOT, Session, dry_folder

MORE = """
what comes out
  <out>/<card>.md and .json  the tables, to be committed; written again after each part
  <out>/<card>.jsonl         one line a finding, as it comes: what is left of a run that was killed (--render makes the tables of it)
  <out>/<card>.log           what the libraries printed

exit codes
  0  right as far as it went    1  a result is wrong: the first line of the report says which
  2  nothing could run (no device; --dry runs all of it, in miniature, on a CPU)    130, 143  cut by Ctrl-C, SIGTERM

examples
  python -m benchmarks.gpu                          all of it, in eight minutes at most
  python -m benchmarks.gpu --parts right --minutes 2
  python -m benchmarks.gpu --dry --out /tmp/look    no GPU needed; tells nothing of speed
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
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
        default=",".join(NAMES),
        help="only these, with commas between them; 'facts' always runs (default: all)",
    )
    made.add_argument("--minutes", type=float, default=8.0, help="the most that all of it takes (default: 8)")
    made.add_argument("--device", default="cuda", help="cuda or cuda:N (default: cuda, the first)")
    made.add_argument("--memory", type=float, metavar="GB", help="of the device, at most (default: what is free)")
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
    chosen = parser().parse_args(arguments)
    if chosen.render:
        try:
            every = read(chosen.render)
        except OSError as error:
            print(f"{chosen.render}: cannot be read: {error.strerror}", file=sys.stderr)
            return 2
        print(json.dumps(page.document(every), indent=1) if chosen.json else page.markdown(every), end="")
        return 0
    parts = [name.strip() for name in chosen.parts.split(",") if name.strip()]
    unknown = [name for name in parts if name not in NAMES]
    if unknown or not parts:
        print(
            f"--parts: there is no part {', '.join(map(repr, unknown)) or 'named'}; there are: {', '.join(NAMES)}",
            file=sys.stderr,
        )
        return 2
    if chosen.minutes <= 0:
        print(f"--minutes: {chosen.minutes:g} is no time", file=sys.stderr)
        return 2
    if chosen.device.partition(":")[0] != "cuda":
        print(f"--device: {chosen.device!r} is no CUDA device; without one, --dry runs on a CPU", file=sys.stderr)
        return 2
    settings = Settings(
        "cpu" if chosen.dry else chosen.device,
        dry=chosen.dry,
        memory=chosen.memory * 1e9 if chosen.memory else None,
        commit=chosen.commit,
    )
    out = chosen.out or (dry_folder() if chosen.dry else ROOT / "benchmarks" / "results")
    words = sys.argv[1:] if arguments is None else arguments
    session = Session(settings, out, parts, 60 * chosen.minutes, shlex.join(["python", "-m", "benchmarks.gpu", *words]))
    code = session.run()
    if code != 2:
        every = session.records.every
        print(json.dumps(page.document(every), indent=1) if chosen.json else page.markdown(every), end="")
        print(f"{session.records.markdown} and .json", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
