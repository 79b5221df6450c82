"""pip, with progress in short lines: what it downloads and how large that is, then how much of it is unpacked."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from factory.set_up.environment import whole
from factory.set_up.journal import Journal, bytes_in, since, size

LARGE = 5e6  # bytes of a download that gets a line of its own
UNITS = {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
DOWNLOAD = re.compile(
    r"\s*(?P<how>Downloading|Using cached) (?P<url>\S+)(?: \((?P<size>[\d.]+) (?P<unit>bytes|[kMG]B)\))?$"
)
COLLECT = re.compile(r"\s*Collecting (?P<name>[\w.-]+)")
INSTALL = re.compile(r"Installing collected packages: (?P<names>.+)")
UNREACHED = re.compile(r"connection broken|NewConnectionError|ConnectTimeoutError|name resolution")
NETWORK = "the package index cannot be reached from here: check the network and pip's configuration, then run the same command again"


def install(venv: Path, folder: Path, wanted: Sequence[str], journal: Journal) -> None:
    """``pip install`` with the arguments ``wanted``. Raises: SetUpError with pip's error."""
    aside = venv / "tmp"  # pip downloads to here: on the checked disk, and its growth is the progress
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    output = PipOutput(folder, aside)
    # Byte-code of all packages would take a third of the time; ``compile_imports`` writes only what is imported.
    options = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--no-compile"]
    command = [str(venv / "bin" / "python"), "-I", "-m", "pip", "install", *options, *wanted]
    environment = {**os.environ, "TMPDIR": str(aside)}
    code = journal.follow([command], output.state, output.hear, environment)
    shutil.rmtree(aside, ignore_errors=True)
    if code:
        journal.fail("pip could not install the packages", NETWORK if output.unreached else "")


class PipOutput:
    """Pip's output so far. ``hear`` takes a line and returns the text to print, if any; ``state`` describes the progress."""

    def __init__(self, folder: Path, aside: Path) -> None:
        self.folder, self.aside = folder, aside
        self.began = time.monotonic()
        self.found: set[str] = set()
        self.unpacking = self.whole_before = self.bytes_before = 0
        self.unreached = False

    def hear(self, line: str) -> str:
        if match := COLLECT.match(line):
            self.found.add(match["name"].lower())
        elif match := DOWNLOAD.match(line):
            return download(match["how"], match["url"], match["size"], match["unit"])
        elif match := INSTALL.match(line):
            return self._unpack(match["names"].count(",") + 1)
        elif UNREACHED.search(line) and not self.unreached:
            self.unreached = True
            return "no answer from the package index; pip tries again"
        return ""

    def _unpack(self, count: int) -> str:
        fetched = f"{size(self._fetched())} fetched in {since(self.began)}"
        self.unpacking, self.began = count, time.monotonic()
        self.whole_before, self.bytes_before = whole(self.folder), bytes_in(self.folder)
        return f"{fetched}; unpacking {count} packages"

    def state(self) -> str:
        if not self.unpacking:
            return f"{len(self.found)} packages found, {size(self._fetched())} fetched, {since(self.began)}"
        done = min(max(whole(self.folder) - self.whole_before, 0), self.unpacking)
        grown = max(bytes_in(self.folder) - self.bytes_before, 0)
        return f"{done} of {self.unpacking} packages unpacked, {size(grown)}, {since(self.began)}"

    def _fetched(self) -> int:
        return sum(bytes_in(path) for path in self.aside.glob("pip-unpack-*"))


def download(how: str, url: str, amount: str | None, unit: str | None) -> str:
    """Downloading, ``…/pyarrow-25.0.1-cp311-….whl``, 50.1, MB → a line; '' for small files and metadata."""
    package = re.fullmatch(r"(?P<name>[^-]+)-(?P<version>[^-]+?)(-.+\.whl|\.tar\.gz|\.zip)", url.rsplit("/", 1)[-1])
    if not package or not amount or not unit or float(amount) * UNITS[unit] < LARGE:
        return ""
    return f"{how.lower()} {package['name']} {package['version']}, {amount} {unit}"
