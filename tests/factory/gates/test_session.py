"""What the trainer of one sandboxed session reads and is read by."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from factory.core.faults import HANDLES, fault_of
from factory.gates.patch.session import PatchSession, _Revealer
from factory.sandbox import clock
from tests.support.failing.limits import few_handles


def test_a_fault_of_the_machine_while_a_run_is_timed_is_raised_and_not_the_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ready").touch()
    handle = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    timed = PatchSession()
    monkeypatch.setattr(clock, "read", lambda init: clock.Reading())  # which needs a handle, too
    try:
        revealer = _Revealer([handle], [{"last_step": 1}], {}, timed, (), {})
        revealer.inits.append(os.getpid())
        with few_handles():
            revealer.run()
        assert fault_of(revealer.fault or AssertionError()) == HANDLES and revealer.enough.is_set() and not timed.failed
        (tmp_path / "segment.json.part").touch()  # by the code in the sandbox
        revealer.run()
        assert timed.failed == "run 0 could not be revealed: File exists"
    finally:
        os.close(handle)
