"""The steps of a set-up, and when none is needed."""

from __future__ import annotations

import argparse
import fcntl
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from factory.set_up.environment import DEV_IMPORTS, IMPORTS, compile_imports, fingerprint, make_venv, packages, whole
from factory.set_up.journal import EVERY, Journal, SetUpError, bytes_in, since, size
from factory.set_up.needs import bubblewrap, obstacles
from factory.set_up.pip import install

# Bytes while packages are unpacked, with torch's CPU build: .venv grows to 1.7 GB, 2.8 with triton and the development tools,
# and holds the downloads, 0.4 and 0.7 GB, until the end.
NEEDED, DEV_NEEDED = 2.5e9, 4e9
STAMP, DEV_STAMP = ".ready", ".ready-dev"


def set_up(
    root: Path,
    dev: bool,
    say: Callable[[str], None],
    imports: Sequence[str] = IMPORTS,
    dev_imports: Sequence[str] = DEV_IMPORTS,
) -> None:
    """Make ``root/.venv`` or bring it up to date. ``dev``: with what tests, lint and benchmarks need. Raises: SetUpError."""
    venv, made_from = root / ".venv", fingerprint(root)
    stamps = [venv / STAMP, venv / DEV_STAMP] if dev else [venv / STAMP]
    ready = lambda: packages(venv) and all(stamp.exists() and stamp.read_text() == made_from for stamp in stamps)
    if ready():
        return
    needed = max((DEV_NEEDED if dev else NEEDED) - bytes_in(venv), 5e8)
    if missing := list(obstacles(root, needed, makes_venv=not packages(venv))):
        raise SetUpError("\n".join(missing))
    with _journal(venv, say) as journal:
        if ready():  # the set-up that was waited for made it
            return
        began = time.monotonic()
        for name in (STAMP, DEV_STAMP):  # a half-updated environment matches neither
            (venv / name).unlink(missing_ok=True)
        bubblewrap(journal)
        folder = make_venv(venv, journal)
        say("installing pinned packages; the first time about 0.5 GB are downloaded, more with a CUDA build of torch")
        project = f"{root}[dev]" if dev else str(root)
        install(venv, folder, ["--constraint", str(root / "constraints.txt"), "--editable", project], journal)
        compile_imports(venv, [*imports, *(dev_imports if dev else ())], journal)
        for stamp in stamps:
            stamp.write_text(made_from)
        say(f"set-up took {since(began)}: {whole(folder)} packages, {size(bytes_in(venv))} in {venv.name}")


@contextmanager
def _journal(venv: Path, say: Callable[[str], None]) -> Iterator[Journal]:
    """``.venv/set-up.log``, locked: two set-ups at once would install into one another.

    Not ``factory.core.file_lock``: set-up runs before its library is installed.
    """
    venv.mkdir(exist_ok=True)
    with (venv / "set-up.log").open("a", buffering=1) as log:
        began = time.monotonic()
        while True:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                say(f"another set-up of this folder is running: waiting, {since(began)}")
                time.sleep(EVERY)
        log.truncate(0)
        yield Journal(log, say)


def main() -> None:
    parser = argparse.ArgumentParser(prog="set_up", description="Makes .venv, or brings it up to date.")
    parser.add_argument("--dev", action="store_true", help="with what tests, lint and benchmarks need")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    try:
        set_up(Path(__file__).resolve().parents[2], options.dev, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        sys.exit("set-up was interrupted: the same command goes on from here")
    except SetUpError as error:
        sys.exit(str(error))


def _stop(*_: object) -> NoReturn:
    raise KeyboardInterrupt
