"""The command line as a person meets it: a process of its own, with its exit code and what it prints."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from factory.cli.app import app
from factory.core.workspace import Workspace
from tests.support.forks import quick
from tests.support.paths import ROOT

# A process that has imported what commands import, once for all tests of this one, and forks for each: Python with torch takes two seconds of
# a core to start. Itself it runs nothing.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.support.factory.imported"])
# Commands that start trainers, probes of exports, or engines.
WITH_MODELS = {"run", "train", "anneal", "evaluate", "generate"}


def factory(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "FACTORY_HOME"} | {"PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("out", "err")]
        process = _started(words, cwd or ROOT, environment, *said)
        process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(words, process.exitcode, *(path.read_text() for path in said))


class Running:
    """The same beside the test, for which it is as a ``subprocess.Popen``; what it says, all in one file."""

    def __init__(self, *words: str, log: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self.log, self.process = log, _started(words, ROOT, environment, log, log)
        self.terminate, self.kill = self.process.terminate, self.process.kill

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("factory", timeout or 0.0)
        return self.process.exitcode


def _started(
    words: tuple[str, ...], cwd: Path, environment: Mapping[str, str], out: Path, err: Path
) -> multiprocessing.context.ForkServerProcess:
    servers = quick.for_commands(of_models=not WITH_MODELS.isdisjoint(words[:1]))
    process = FORKS.Process(target=_run, args=(words, str(cwd), dict(environment), str(out), str(err), servers))
    process.start()
    return process


def _run(
    words: tuple[str, ...], cwd: str, environment: Mapping[str, str], out: str, err: str, servers: Mapping[quick.Kind, str]
) -> None:  # fmt: skip
    """``python -m factory`` from where its imports are done."""
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, out, os.O_WRONLY), (2, err, os.O_WRONLY)):
        opened = os.open(path, flags | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process; multiprocessing gave it another
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["factory", *words]
    sys.path.insert(0, cwd)
    quick.have(servers)
    from factory.__main__ import main

    try:
        main()
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends without


def command_here(*words: str, home: Workspace) -> Result:
    """The same within this process. An error of the user's is its ``exception``."""
    return CliRunner().invoke(app, [*words, "-w", str(home.root)])
