"""Devices have one holder each, and jobs run side by side."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from factory import devices


def test_what_runs_side_by_side_has_the_device_alone() -> None:
    inside, most, gate = [0], [0], threading.Barrier(4)

    def job() -> str:
        gate.wait(30)  # all four are there before one begins
        with devices.one(), devices.one():  # who holds it keeps it
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            threading.Event().wait(0.02)
            inside[0] -= 1
        return threading.current_thread().name

    assert len(set(devices.side_by_side([job] * 4))) == 4
    assert most[0] == 1


def test_all_end_before_the_first_error_is_raised() -> None:
    ended = []

    def fails() -> None:
        raise ValueError("one")

    def lasts() -> None:
        threading.Event().wait(0.1)
        ended.append(True)

    with pytest.raises(ValueError, match="one"):
        devices.side_by_side([fails, lasts])
    assert ended == [True]


TWO = """
import torch
torch.cuda.device_count = lambda: 2
from factory import devices
seen = [devices.environment()]
with devices.one():
    seen.append(devices.environment())
    devices.side_by_side([lambda: seen.append(devices.environment())] * 2)
    def other():
        with devices.one():
            seen.append(devices.environment())
    devices.side_by_side([other] * 2)
print(seen)
"""


def test_each_gpu_is_named_as_the_machine_names_it() -> None:
    names = [[], ["CUDA_VISIBLE_DEVICES"]]
    for visible, first, second in (("", "0", "1"), ("5,3", "5", "3")):
        found = subprocess.run(
            [sys.executable, "-c", TWO],
            env={"CUDA_VISIBLE_DEVICES": visible},
            capture_output=True,
            text=True,
            check=True,
        )
        held, other = ({names[1][0]: device} for device in (first, second))
        assert eval(found.stdout) == [{}, held, {}, {}, other, other]  # a job's thread holds nothing by itself
