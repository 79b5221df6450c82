"""``factory serve`` as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import psutil

from factory.core.workspace import Workspace
from tests.support.paths import ROOT
from tests.support.serving.served import PROMPT

PATIENCE = 600.0  # a bug's, not a machine's


@dataclass
class Process:
    inner: subprocess.Popen[str]
    lines: list[str]
    address: str

    def until(self, words: str) -> None:
        """It printed a line with ``words``."""
        assert self.inner.stdout
        while not any(words in line for line in self.lines):
            line = self.inner.stdout.readline()
            assert line, (self.lines, self.inner.wait())
            self.lines.append(line)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.inner.pid).children(recursive=True)

    def ask(self) -> httpx.Response:
        return httpx.post(f"{self.address}/completions", json={"prompt": PROMPT, "max_tokens": 20}, timeout=PATIENCE)


@contextmanager
def served(workspace: Workspace, *words: str) -> Iterator[Process]:
    command = [sys.executable, "-m", "factory", "serve", "--workspace", str(workspace.root), "--port", "0", *words]
    inner = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    process = Process(inner, [], "")
    try:
        process.until("The server listens at")
        process.address = process.lines[-1].split()[4]
        yield process
    finally:
        inner.kill()
        inner.wait()


def gone(processes: list[psutil.Process]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        assert time.monotonic() < deadline, processes
        time.sleep(0.05)
    return True
