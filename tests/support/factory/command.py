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


def factory(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "FACTORY_HOME"} | {"PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("out", "err")]
        process = FORKS.Process(
            target=_run, args=(words, str(cwd or ROOT), environment, *map(str, said), quick.for_commands())
        )
        process.start()
        process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(words, process.exitcode, *(path.read_text() for path in said))


def _run(
    words: tuple[str, ...], cwd: str, environment: Mapping[str, str], out: str, err: str, servers: Mapping[quick.Kind, str]
) -> None:  # fmt: skip
    """``python -m factory`` from where its imports are done."""
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, out, os.O_WRONLY), (2, err, os.O_WRONLY)):
        opened = os.open(path, flags | os.O_CREAT)
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
