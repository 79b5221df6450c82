"""Quick processes: forks of one that has imported torch, in place of new ones. Python with torch takes two seconds of a core to start.

Sandboxes stay real: bubblewrap makes the namespaces and mounts, and ``server.py`` joins them under the same filter. Only Landlock, which forbids
once more what the mounts forbid, is not in force in the fork. Tests of the sandbox, the attacks (``ANEW``) and the long tier start all anew.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from factory.bundles import checking
from factory.core import launching
from factory.evals.probes import engine_process
from factory.evals.probes import server as server_probe
from factory.sandbox import bubblewrap
from factory.sandbox import seccomp_filter as sandbox_filter
from factory.sandbox.filesystem_view import make_sandbox_environment
from factory.serving import engines, parity_fixture
from tests.support.paths import ROOT

TESTS = ROOT / "tests"
ANEW = [TESTS / name for name in ("attacks", "factory/sandbox", "factory/training/test_live_sandbox.py")]
YET_QUICK = [
    TESTS / "attacks" / f"test_{name}.py"
    for name in ("honest_patches", "matrix_attacks", "op_answers", "training_attacks")
]  # of sums, not of walls
HERE = Path(__file__).parent
FOLDER = "FACTORY_TESTS_FORKS"  # names the folder of a run's servers
if FOLDER not in os.environ:
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="factory-tests-forks-")
    atexit.register(shutil.rmtree, os.environ[FOLDER], ignore_errors=True)
SHARED = Path(os.environ[FOLDER])
# What libraries read when they are loaded: a server for each set of values. The fork gets its command's environment whole.
READ_AT_ONCE = (
    "ATEN_", "CUDA_", "DNNL_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_",
)  # fmt: skip
BY_MODELS = ("HF_HUB_OFF", "TRANSFORMERS_")  # by what has a model of transformers
# How idle threads wait, which changes no result (in every server they sleep), and what no library that is loaded here reads.
CHANGES_NOTHING = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_DUPLICATE_LIB_OK"}
if not Path("/dev/nvidia0").exists():
    CHANGES_NOTHING.add("CUDA_VISIBLE_DEVICES")
TRAINERS = (
    "numpy.random", "numpy.typing", "pyarrow.compute", "pyarrow.parquet", "pydantic.fields", "pydantic.root_model", "pydantic.types",
    "safetensors.torch", "tokenizers", "torch", "torch.distributed", "torch.nn.attention.flex_attention", "torch.utils._device",
    "torch.utils.flop_counter", "yaml", "zoneinfo",
)  # fmt: skip
SERVERS = (
    *TRAINERS,
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "uvicorn",
    "starlette.applications",
)

Kind = tuple[tuple[tuple[str, str], ...], tuple[str, ...]]  # a server's environment, and what it imports
_sandboxed = bubblewrap.build_bubblewrap_command
_quick, _may_start = False, True
_servers: dict[Kind, str] = {}  # address by kind


def of(item: pytest.Item) -> None:
    """From here on processes are started as this test may have them."""
    anew = item.path not in YET_QUICK and any(item.path.is_relative_to(path) for path in ANEW)
    _start_by_forks(not anew and not item.get_closest_marker("long"))


def _start_by_forks(quick: bool) -> None:
    global _quick
    _quick = quick
    bubblewrap.build_bubblewrap_command = _command
    # A name that is gone raises: processes would start anew, and no test would notice but by its seconds.
    for module, name, ours in (
        (checking, "subprocess", _Subprocess()),
        (engine_process, "run_in_background_process", _background_process),
        (server_probe, "run_in_background_process", _background_process),
        (engines, "asyncio", _Asyncio()),
        (parity_fixture, "asyncio", _Asyncio()),
    ):
        getattr(module, name)
        setattr(module, name, ours)


def _command(
    words: Sequence[str],
    opening: Any,
    *,
    given: Sequence[tuple[str, str]],
    environment: Mapping[str, str],
    **others: Any,
) -> list[str]:
    launcher, command = words[:5], words[5:]
    of_python = (
        command[:1] == [sys.executable]
        and len(command) > 1
        and (command[1] in ("-m", "-c") or command[1].endswith(".py"))
    )
    if of_python and (server := _server(environment, TRAINERS)):
        words = [*launcher, sys.executable, "-I", "-S", "/run/inside.py", "/run/forks", *command]
        given = [*given, (str(HERE / "inside.py"), "/run/inside.py"), (server, "/run/forks")]
    return _sandboxed(words, opening, given=given, environment=environment, **others)


class _Subprocess:
    """The module, for processes that have a model of transformers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def run(self, command: Sequence[str], *, env: Mapping[str, str], **others: Any) -> subprocess.CompletedProcess[Any]:
        if words := forked(env, SERVERS):
            command = [*words, *(word for word in command if word != "-P")]  # the folder of a fork is an empty one
        return subprocess.run(command, env=env, **others)


class _Asyncio:
    """The module, for engines that serve and what they are held to. A SIGSTOP to one stops no fork: such a test starts it anew."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def create_subprocess_exec(self, *command: str, env: Mapping[str, str], **others: Any) -> Any:
        ours = command[0] == sys.executable and "factory.serving" in " ".join(command[:4])
        fork = forked(env, SERVERS) if ours else ()
        return await asyncio.create_subprocess_exec(
            *fork, *(w for w in command if not fork or w != "-P"), env=env, **others
        )


def _background_process(
    command: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str]
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Of an engine, and of a model of transformers."""
    return launching.run_in_background_process([*forked(environment, SERVERS), *command], folder, log, environment)


def forked(environment: Mapping[str, str], imports: Sequence[str] = TRAINERS) -> Sequence[str]:
    """Words before ``[sys.executable, …]`` that make a process of this environment a fork: its exit code, output, SIGINT and SIGTERM are the fork's,
    which is killed when the process is, a moment later. None where this test may have no such."""
    server = _server(environment, imports)
    return (sys.executable, "-I", "-S", str(HERE / "inside.py"), server) if server else ()


def for_commands(of_models: bool = False) -> dict[Kind, str]:
    """The servers of this process, for ``have`` in one that it starts; among them that of trainers whose recipe says nothing of threads.
    ``of_models``: and those of its probes and of trainers with one thread, as this process would start them."""
    _server(make_sandbox_environment(Path("/tmp")), TRAINERS)
    if of_models:
        _server(make_sandbox_environment(Path("/tmp")) | {"OMP_NUM_THREADS": "1"}, TRAINERS)
        for environment in (os.environ | engine_process.NO_GPU, server_probe.ENVIRONMENT):
            _server(environment, SERVERS)
    return _servers if _quick else {}


def have(servers: Mapping[Kind, str]) -> None:
    """In a process that a test started: what it starts are forks of these. Where there is none of a kind, it starts anew."""
    global _may_start
    _may_start = False
    _servers.update(servers)
    _start_by_forks(bool(servers))


def _server(environment: Mapping[str, str], imports: Sequence[str]) -> str:
    """The address of one that was started with what this environment says to libraries; '' where this test may have none."""
    read = READ_AT_ONCE + (BY_MODELS if imports == SERVERS else ())
    said = (
        (name, value) for name, value in environment.items() if name.startswith(read) and name not in CHANGES_NOTHING
    )
    kind = tuple(sorted(said)), tuple(imports)
    if _quick and _may_start and kind not in _servers:
        _servers[kind] = _of_this_run(*kind)
    return _servers.get(kind, "") if _quick else ""


def _of_this_run(environment: tuple[tuple[str, str], ...], imports: Sequence[str]) -> str:
    """The workers of a run share each: whoever asks first starts it. It ends with the run."""
    place = SHARED / hashlib.sha256(repr((environment, imports)).encode()).hexdigest()[:16]
    with open(SHARED / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            _start(place, environment, imports)
    return str(place)


def _start(place: Path, environment: tuple[tuple[str, str], ...], imports: Sequence[str]) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(place))
    listening.listen(64)
    run = os.pidfd_open(os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid())
    subprocess.Popen(
        [
            sys.executable,
            str(HERE / "server.py"),
            str(listening.fileno()),
            sandbox_filter.assemble_filter().hex(),
            *imports,
        ],
        env={"PATH": os.environ["PATH"], "OMP_WAIT_POLICY": "PASSIVE", **dict(environment)},
        cwd=tempfile.mkdtemp(dir=place.parent),
        stdin=run,  # can be read once it has ended
        pass_fds=[listening.fileno()],
        start_new_session=True,
    )
    os.close(run)
