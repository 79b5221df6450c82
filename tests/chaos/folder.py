"""A folder and a program for tests of the shim and of single flushes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.server import POLL_SECONDS, kill_marked
from tests.chaos.shim import Control, Effect, environment, read_log


class Folder:
    """A folder in which effects are counted, and a program that makes some."""

    def __init__(self, path: Path) -> None:
        self.root, self.log, self.store = path / "root", path / "log", path / "store"
        for folder in (self.root, self.store):
            folder.mkdir()
        self.control = Control(path / "control")

    def run(
        self, program: str, mode: str = "record", target: int = 0, look: Callable[[int], None] = lambda number: None
    ) -> tuple[int, str]:
        """Run the program. Returns its exit code and stderr. In the mode 'hold', ``look`` is called before each effect."""
        self.control.arm(self.root, self.log, mode, target, self.store)
        words = [sys.executable, "-S", "-c", program]
        variables = os.environ | environment(self.control.path)
        process = subprocess.Popen(words, cwd=self.root, env=variables, stderr=subprocess.PIPE, text=True)
        while process.poll() is None and not self.control.dead:
            if held := self.control.held:
                look(held)
                self.control.release(held)
            else:
                time.sleep(POLL_SECONDS)
        kill_marked(self.control.path)  # processes that wait for ever at their next effect
        _, said = process.communicate()
        return process.returncode, said

    @property
    def effects(self) -> list[Effect]:
        return read_log(self.log)

    def named(self) -> list[str]:
        return [f"{e.kind} {e.place(self.root)}" for e in self.effects]
