"""Each device has one holder at a time, and jobs run in parallel."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextvars import ContextVar
from pathlib import Path

import pytest

from factory.core import devices
from tests.support.factory.sandboxed import inside
from tests.support.forks import quick
from tests.support.patience import PATIENCE_S


def test_parallel_jobs_hold_the_device_one_at_a_time() -> None:
    inside, most, gate = [0], [0], threading.Barrier(4)

    def job() -> str:
        gate.wait(PATIENCE_S)  # all four have started before any takes the device
        with devices.hold_device(), devices.hold_device():  # a holder keeps its device
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            threading.Event().wait(0.02)
            inside[0] -= 1
        return threading.current_thread().name

    assert len(set(devices.run_in_parallel([job] * 4))) == 4
    assert most[0] == 1


def test_all_jobs_end_before_the_first_error_is_raised() -> None:
    ended = []

    def fails() -> None:
        raise ValueError("one")

    def lasts() -> None:
        threading.Event().wait(0.1)
        ended.append(True)

    with pytest.raises(ValueError, match="one"):
        devices.run_in_parallel([fails, lasts])
    assert ended == [True]


TWO = """
import torch
torch.cuda.device_count = lambda: 2
from factory.core import devices
seen = [devices.make_device_environment()]
with devices.hold_device():
    seen.append(devices.make_device_environment())
    devices.run_in_parallel([lambda: seen.append(devices.make_device_environment())] * 2)
    def other():
        with devices.hold_device():
            seen.append(devices.make_device_environment())
    devices.run_in_parallel([other] * 2)
print(seen)
"""


def test_each_gpu_has_the_name_that_the_environment_gives_it() -> None:
    names = [[], ["CUDA_VISIBLE_DEVICES"]]
    for visible, first, second in (("", "0", "1"), ("5,3", "5", "3")):
        environment = {"CUDA_VISIBLE_DEVICES": visible}
        found = subprocess.run(
            [*quick.forked(environment), sys.executable, "-c", TWO],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        held, other = ({names[1][0]: device} for device in (first, second))
        assert eval(found.stdout) == [{}, held, {}, {}, other, other]  # a new thread holds no device


@pytest.mark.usefixtures("isolates")
def test_only_the_holder_of_a_gpu_gives_its_device_files_to_a_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = next((name for name in ("hwrng", "fuse", "loop-control", "kmsg") if Path("/dev", name).exists()), "")
    if not stand_in:
        pytest.skip("no device of this machine can stand in for a GPU")
    monkeypatch.setattr(devices, "GPU_FILES", (stand_in,))
    script = """
        import json, os, stat, sys
        mode = os.stat(sys.argv[1]).st_mode if os.path.exists(sys.argv[1]) else 0
        print(json.dumps([stat.S_ISCHR(mode), os.path.exists('/sys/devices'), os.environ.get('CUDA_VISIBLE_DEVICES')]))
    """
    alone = inside(tmp_path, script, f"/dev/{stand_in}")
    assert alone.ok and json.loads(alone.stdout) == [False, False, None], alone
    monkeypatch.setattr(devices, "_held", ContextVar("device", default="3"))
    held = inside(tmp_path, script, f"/dev/{stand_in}")
    assert held.ok and json.loads(held.stdout) == [True, True, "3"], held
