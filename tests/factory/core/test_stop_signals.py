"""SIGTERM and Ctrl-C at difficult moments: during imports, as process 1 of a container, during the parity probe."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.stopping import WITHIN, left_of, started_by, wait_for

GO_ON = "factory: stopped; run the same command again to continue\n"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

# Runs ``python -m factory status`` and sends itself a signal just before the named module is imported.
AT_AN_IMPORT = """
import os, runpy, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and stays so
name, number = sys.argv[1], int(sys.argv[2])
class Strike:
    def find_spec(self, wanted, *_):
        if wanted == name:
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Strike())
sys.argv[1:] = ["status", "--workspace", "/nowhere"]
runpy.run_module("factory", run_name="__main__")
"""


MODULES = ("factory.cli", "typer", "factory.core.stop_signals", "factory.cli.app", "factory.cli.safety")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize(
    ("module", "number"),
    [*((one, signal.SIGTERM) for one in MODULES), ("typer", signal.SIGINT), ("typer", signal.SIGHUP)],
)
def test_a_signal_during_imports_prints_one_line_and_no_traceback(module: str, number: signal.Signals) -> None:
    words = [sys.executable, "-c", AT_AN_IMPORT, module, str(int(number))]
    done = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", GO_ON)


def test_nothing_large_is_imported_before_signals_are_handled() -> None:
    program = "import sys; before = set(sys.modules); import factory.__main__; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    packages = {name.partition(".")[0] for name in done.stdout.split()}
    assert packages - sys.stdlib_module_names == {"factory"} and "factory.cli" not in done.stdout


def test_process_1_of_a_container_ends_at_sigterm(workspace: Workspace, ledger: Ledger) -> None:
    """For process 1 the kernel drops every signal that has no handler."""
    apart = "unshare --user --map-root-user --pid --fork --kill-child"
    words = [*apart.split(), sys.executable, "-m", "factory", "run", "--workspace", str(workspace.root)]
    if subprocess.run([*words[:5], "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no user namespaces")
    lock = workspace.root / "model-loop.lock"
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)
    wait_for(lock, PATIENCE_S)
    (first,) = started_by(process.pid)
    assert Path(f"/proc/{first.pid}/status").read_text().split("NSpid:")[1].split("\n")[0].split()[-1] == "1"
    os.kill(first.pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=WITHIN)
    assert said.endswith(GO_ON) and "Traceback" not in said and process.returncode == 128 + signal.SIGTERM


# Signals that arrive in callbacks whose exceptions the interpreter drops. Each of the ``losses`` callbacks gets one.
IN_A_CALLBACK = """
import os, signal, sys, time, weakref
from factory.core import stop_signals
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and stays so
how, number, losses = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
class Thing:
    pass
class Dying:
    def __del__(self):
        strike()
pause = 0.0
def strike(*_):
    global losses, pause
    losses -= 1
    if pause == 0.0:
        os.kill(os.getpid(), number)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:  # until the handler raises here
        time.sleep(pause)
def lose():
    thing = Dying() if how == "del" else Thing()
    kept = weakref.ref(thing, strike) if how == "weakref" else None
    del thing
end_if_stopped = stop_signals.install_stop_signal_handlers()
try:
    lose()
    pause = 0.001
    while losses > 0:
        lose()  # the repeated signal arrives here
    time.sleep(5)
    print("not told")
except stop_signals.StopInterrupt:
    print("unwound")
    sys.stdout.flush()
    end_if_stopped()
"""


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("how", ["weakref", "del"])
def test_a_signal_in_a_callback_that_drops_exceptions_is_not_lost(how: str, number: signal.Signals) -> None:
    words = [sys.executable, "-c", IN_A_CALLBACK, how, str(int(number))]
    for losses in ("1", "40"):  # 40 take longer than SAME_SECONDS; after that a second signal ends the process at once
        done = subprocess.run([*words, losses], capture_output=True, text=True, env=ENVIRONMENT)
        assert (done.returncode, done.stdout, done.stderr) == (128 + number, "unwound\n", GO_ON)


FAILS_IN_A_CALLBACK = """
import sys
from factory.core import stop_signals
stop_signals.install_stop_signal_handlers()
class Dying:
    def __del__(self):
        raise ValueError("a bug")
Dying()
"""


def test_an_error_in_a_callback_without_a_signal_is_still_printed() -> None:
    done = subprocess.run([sys.executable, "-c", FAILS_IN_A_CALLBACK], capture_output=True, text=True, env=ENVIRONMENT)
    assert "ValueError: a bug" in done.stderr and done.returncode == 0


ASKING = """
import sys
from pathlib import Path
from factory.core import stop_signals
from factory.evals.probes.engine_process import NATIVE, start_engine
end_if_stopped = stop_signals.install_stop_signal_handlers()
try:
    with start_engine(NATIVE, Path("/nowhere")) as engine:
        engine.run_checks({}, 600)
except stop_signals.StopInterrupt:
    end_if_stopped()
"""
PROBING = """
import sys
from factory.core import stop_signals
from factory.evals.probes.server import run_transformers_probe
end_if_stopped = stop_signals.install_stop_signal_handlers()
try:
    run_transformers_probe({"memory_mib": 8000}, 600)
except stop_signals.StopInterrupt:
    end_if_stopped()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize(
    ("program", "name"), [(PROBING, "server_probe"), (ASKING, "native.server")], ids=["probe", "engine"]
)
def test_the_parity_probe_ends_with_the_factory(
    number: signal.Signals, tmp_path: Path, program: str, name: str
) -> None:
    """The probe is suspended before it can fail by itself: its request is incomplete, and torch takes seconds to import."""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    while not (probes := [p for p in started_by(process.pid) if name in " ".join(command_of(p))]):
        assert process.poll() is None
    os.kill(probes[0].pid, signal.SIGSTOP)  # so that the probe does not end before the test checks it
    process.send_signal(number)
    with contextlib.suppress(ProcessLookupError):  # a kill also ends a suspended process
        os.kill(probes[0].pid, signal.SIGCONT)
    _, errors = process.communicate(timeout=WITHIN)
    assert not left_of(probes, WITHIN) and "Traceback" not in errors
    assert number == signal.SIGKILL or (process.returncode, errors) == (128 + number, GO_ON)


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
