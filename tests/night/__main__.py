"""A night of the daemon in miniature: ``python -m tests.night --minutes 30``; ``make chaos`` ends with it.

A real daemon ingests, trains, anneals, judges and releases a tiny model. Every minute a small shard arrives, and a random fault hits the daemon
or its workspace. A person acts only if the daemon's message asks for it. In the morning (``tests.night.morning``) every document was ingested
once, every shard was trained on, the weights equal those of a night without faults to the bit, and the champion is the right one.

    python -m tests.night --minutes 5 --seed 3
    python -m tests.night --faults 'trainer hangs,disk full' --minutes 4
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from factory.backups.backups import make_or_open_ledger
from tests.night.daemon import Night
from tests.night.faults import FAULTS, Fault
from tests.night.morning import wrong_in_the_morning
from tests.support.factory.code_loop import make_target
from tests.support.plants.trained_plant import lenient_plant, write_shards

SETTINGS = {
    "stability": {"window": 16, "noise_scale_every": 5},
    "schedule": {"warmup_steps": 4, "trunk_steps": {"first": 24, "later": 12}, "anneal_steps": 12},
}
POLICIES = {  # for a plant with steps of milliseconds on a small disk
    "retention.yaml": "floor_bytes: 50000000\n",
    "retries.yaml": "first_wait_seconds: 2.0\nhung_seconds: 15.0\nstart_seconds: 60.0\n",
}
DISK_MIB = 900  # size of the workspace's file system, which a fault can fill
MINUTE = 60.0


@dataclass(frozen=True)
class Injected:
    minute: int
    fault: str
    what: str
    seconds: float | None  # until the daemon made progress again; None: it made none
    by_hand: str  # the command that a person had to run


@contextmanager
def disk(root: Path) -> Iterator[bool]:
    """Mount a small file system at ``root``. Yields whether this user may; otherwise ``root`` is a folder, and the disk is never filled."""
    root.mkdir()
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "factory-night", str(root)], capture_output=True, check=False
    ).returncode  # fmt: skip
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(root)], check=False)


def chosen_faults(names: str, mounted: bool) -> list[Fault]:
    known = {fault.name: fault for fault in FAULTS if mounted or not fault.needs_own_disk}
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"no fault {unknown[0]!r} here; there are: {', '.join(known)}")
    return [known[name] for name in wanted]


def live_through(night: Night, faults: list[Fault], minutes: int) -> list[Injected]:
    """Add a shard and a fault each minute. Each fault comes once before any comes again."""
    done: list[Injected] = []
    queue: list[Fault] = []
    for minute in range(minutes):
        begun = time.monotonic()
        night.drop(f"minute-{minute:02d}")
        night.watch_until(begun + night.rng.uniform(0, 0.5) * MINUTE)
        queue = queue or night.rng.sample(faults, len(faults))
        fault = queue.pop()
        since, place, acted = night.last_event(), night.out.stat().st_size, time.monotonic()
        print(f"minute {minute + 1} of {minutes}: {fault.name}", end=" ", file=sys.stderr, flush=True)
        what = fault.act(night)
        back = night.watch_until(time.monotonic() + night.patience(), since)
        by_hand = ""
        if back is None and fault.by_hand:  # a person does what the daemon asks for
            by_hand = fault.by_hand
            assert by_hand in night.said_since(place), f"{fault.name}: nobody was told to run {by_hand!r}"
            night.command(*by_hand.split()[1:])
            back = night.watch_until(time.monotonic() + night.patience(), since)
        seconds = back - acted if back else None
        print(
            f"({what}): " + (f"progress after {seconds:.0f} s" if seconds else "NO PROGRESS"),
            file=sys.stderr,
            flush=True,
        )
        done.append(Injected(minute + 1, fault.name, what, seconds, by_hand or fault.always_by_hand))
        night.watch_until(begun + MINUTE)
    return done


def table(done: list[Injected], wrong: list[str], seconds: float, seed: int) -> list[str]:
    lines = [f"{'fault':<34}{'times':>6}{'recovered':>11}{'median s':>10}{'worst s':>9}  a person"]
    for name in sorted({one.fault for one in done}):
        mine = [one for one in done if one.fault == name]
        times = [one.seconds for one in mine if one.seconds is not None]
        middle, worst = (f"{statistics.median(times):.0f}", f"{max(times):.0f}") if times else ("", "")
        hands = ", ".join(sorted({one.by_hand for one in mine if one.by_hand})) or "–"
        lines.append(f"{name:<34}{len(mine):>6}{len(times):>11}{middle:>10}{worst:>9}  {hands}")
    back = sum(one.seconds is not None for one in done)
    return [
        *lines,
        f"night of {seconds / 60:.0f} minutes, seed {seed}: {len(done)} faults, {back} recovered; in the morning {len(wrong)} things are wrong",
        *wrong,
    ]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=30, help="how long, with a fault a minute (30)")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of faults and moments (drawn)"
    )
    parser.add_argument("--faults", default="", help="only these, with commas between")
    parser.add_argument("--keep", action="store_true", help="leave the workspace there")
    asked = parser.parse_args(arguments)
    # A shell starts background processes with ignored interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    root = Path(tempfile.mkdtemp(prefix="factory-night-"))
    began = time.monotonic()
    with disk(root / "disk") as mounted:
        workspace = lenient_plant(root / "disk", make_target(root / "target"), **SETTINGS)
        make_or_open_ledger(workspace)
        for name, text in POLICIES.items():
            (workspace.root / "policies" / name).write_text(text)
        night = Night(workspace, root / "daemon.out", random.Random(asked.seed), own_tmpfs=mounted)
        night.out.touch()
        write_shards(workspace.inbox)
        for path in workspace.inbox.glob("*.jsonl"):
            night.dropped[path.name] = [json.loads(line)["id"] for line in path.read_text().splitlines()]
        night.start()
        try:
            done = live_through(night, chosen_faults(asked.faults, mounted), asked.minutes)
        finally:
            if night.daemon and night.daemon.poll() is None:
                night.daemon.send_signal(signal.SIGTERM)
                night.daemon.wait()
        wrong = [f"the daemon ended by itself: {death}" for death in night.deaths] + wrong_in_the_morning(night)
        if asked.keep:
            shutil.copytree(workspace.root, root / "kept", symlinks=True)
    print("\n".join(table(done, wrong, time.monotonic() - began, asked.seed)))
    if wrong or asked.keep:
        print(f"left there: {root}", file=sys.stderr)
    else:
        shutil.rmtree(root)
    return int(bool(wrong) or any(one.seconds is None for one in done))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
