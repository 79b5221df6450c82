"""Starts, watches and kills the daemon of a night, and adds shards for it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from factory.core.workspace import Workspace
from factory.ledger.reader import LedgerReader
from factory.retrying.policy import RetryPolicy
from factory.retrying.watchdog import TRAINER_BEGUN
from tests.support.paths import ROOT
from tests.support.plants.trained_plant import WORDS

PROGRESS = ("segment_done",)
PATIENCE_SECONDS = 200.0  # on a machine whose trainers start at once


@dataclass
class Night:
    """A night: the workspace and the daemon on which faults act."""

    workspace: Workspace
    out: Path  # the daemon's output, outside the workspace
    rng: random.Random
    daemon: subprocess.Popen[bytes] | None = None
    dropped: dict[str, list[str]] = field(default_factory=dict)  # shard → ids of its documents
    own_tmpfs: bool = False
    deaths: list[str] = field(default_factory=list)  # deaths of the daemon that no fault caused
    longest_start: float = 0.0  # seconds from a trainer's start to its first step, so far

    @property
    def read(self) -> LedgerReader:
        return LedgerReader(self.workspace)

    def start(self) -> None:
        with open(self.out, "ab") as out:
            self.daemon = subprocess.Popen(
                [sys.executable, "-m", "factory", "run", "--workspace", str(self.workspace.root)],
                cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip

    def tree(self) -> list[psutil.Process]:
        assert self.daemon is not None
        try:
            daemon = psutil.Process(self.daemon.pid)
            return [daemon, *daemon.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def trainers(self) -> list[psutil.Process]:
        """Return the processes that train now; [] between two segments."""
        found = []
        for process in self.tree()[1:]:
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if "trainer" in words and "python" in Path(words[0]).name:
                found.append(process)
        return found

    def wait_for_trainer(self, seconds: float = 120.0) -> list[psutil.Process]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := self.trainers():
                return found
            time.sleep(0.05)
        return []

    def kill(self, whole_tree: bool = True) -> None:
        assert self.daemon is not None
        for process in self.tree() if whole_tree else self.tree()[:1]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.daemon.wait()

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "factory", *words, "--workspace", str(self.workspace.root)],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip

    def said_since(self, place: int) -> str:
        with open(self.out, "rb") as file:
            file.seek(place)
            return file.read().decode(errors="replace")

    def drop(self, name: str, rows: int = 40) -> list[str]:
        """Add a shard as a careful user does: write it under another name, then rename it."""
        lines, ids = [], []
        for number in range(rows):
            key = f"{name}/{number}"
            body = "\n".join(
                f"    {self.rng.choice(WORDS)}_{self.rng.randint(0, 9999)} = {self.rng.choice(WORDS)}({self.rng.randint(0, 99999)})"
                for _ in range(6)
            )
            text = f"def {self.rng.choice(WORDS)}_{self.rng.randint(0, 99999)}(value):\n{body}\n    return value\n"
            lines.append(json.dumps({"id": key, "text": text, "domain": "code", "source": key}))
            ids.append(key)
        aside = self.workspace.inbox / f"{name}.jsonl.part"
        while True:
            try:
                aside.write_text("\n".join(lines) + "\n")
                break
            except OSError:  # the disk is full: a user tries again
                time.sleep(1.0)
        aside.rename(self.workspace.inbox / f"{name}.jsonl")
        self.dropped[f"{name}.jsonl"] = ids
        return ids

    def last_event(self) -> int:
        kinds = ", ".join(f"'{kind}'" for kind in PROGRESS)
        try:
            found = self.read.read(f"SELECT max(id) AS newest FROM events WHERE kind IN ({kinds})")
        except Exception:  # the ledger is damaged, or locked
            return -1
        return int(found[0]["newest"] or 0) if found else 0

    def patience(self) -> float:
        """Return the seconds within which the daemon must make progress.

        Its watchdog allows a trainer ``hung_times`` the longest start so far before the first step. The time is twice that, for the next trainer.
        """
        with contextlib.suppress(Exception):  # the ledger is damaged or locked: use the earlier value
            begun = self.read.read(f"SELECT detail FROM events WHERE kind = '{TRAINER_BEGUN}'")
            self.longest_start = max([self.longest_start, *(one["detail"]["seconds"] for one in begun)])
        return PATIENCE_SECONDS + 2 * RetryPolicy().hung_times * self.longest_start

    def watch_until(self, deadline: float, since: int | None = None) -> float | None:
        """Watch the daemon; note an unexpected end and start it again. Returns when the daemon made progress after ``since``."""
        while time.monotonic() < deadline:
            assert self.daemon is not None
            if (code := self.daemon.poll()) is not None:
                self.deaths.append(f"exit {code}: " + self.out.read_text(errors="replace")[-400:])
                self.start()
            if since is not None and self.last_event() > since:
                return time.monotonic()
            time.sleep(0.5)
        return None
