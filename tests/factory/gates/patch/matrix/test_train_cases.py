"""The program that trains the tiny runs, but for what it trains."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from factory.gates.patch.matrix import train_cases
from kernels.contract import registry

RANK = """
    import json, os, socket, sys
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT")
    with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 60):  # the store is this test's
        open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").write(" ".join(os.environ[name] for name in names))
    sys.exit(int(sys.argv[2 + int(os.environ["RANK"])]))
"""


@pytest.mark.parametrize(("ends", "code"), [("000", 0), ("030", 3), ("052", 5)])
def test_ranks_find_one_another_at_this_process_and_the_first_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, code: int
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(dedent(RANK))
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path), *ends])
    assert train_cases.as_ranks(len(ends)) == code
    told = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert told == [f"{rank} {rank} 3 3 True 0" for rank in range(3)]


def test_threads_that_are_started_late_wait_before_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []
    monkeypatch.setattr(time, "sleep", order.append)
    for late in (train_cases.late_threads(), contextlib.nullcontext()):
        with late:
            thread = threading.Thread(target=order.append, args=("begun",))
            thread.start()
            thread.join()
    assert order == [train_cases.LATE_SECONDS, "begun", "begun"]


PROGRAMS = {
    "sys.exit(3)": 3,
    "sys.exit()": 0,
    "sys.exit('words')": 1,
    "pass": 0,
    "assert sys.argv[1:] == ['a', 'b']": 0,
}


@pytest.mark.parametrize("body", PROGRAMS)
def test_a_program_ends_with_the_code_that_it_would_end_a_process_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    (tmp_path / "tool.py").write_text(f"import sys\nprint('said')\n{body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = sys.argv
    assert train_cases.use(tmp_path, "tool", ["a", "b"]) == PROGRAMS[body] and sys.argv is before
    assert (tmp_path / "printed.txt").read_text() == "said\n"
    (tmp_path / "tool.py").unlink()


def test_an_op_that_is_disturbed_is_some_roundings_off_and_otherwise_for_another_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, up = (torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))

    def made(seed: int) -> list[torch.Tensor]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(registry, "bind", registry.bind)  # put back
            if seed:
                train_cases.disturb_ops(seed)
            given = gate.clone().requires_grad_()
            result = registry.bind({}).swiglu(given, up)
            (result * up).sum().backward()
            assert given.grad is not None
            return [result.detach(), given.grad]

    exact = made(0)
    for one, other in ((1, 1), (1, 2)):
        for plain, a, b in zip(exact, made(one), made(other), strict=True):
            off = (a - plain).abs() / (plain.abs() + plain.square().mean().sqrt())
            eps = torch.finfo(torch.float32).eps
            assert eps / 50 < float(off.mean()) and float(off.max()) < 2 * eps
            assert torch.equal(a, b) == (one == other)
