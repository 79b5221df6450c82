"""The program that trains the tiny runs. No test here trains."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from factory.gates.patch.matrix import train_cases
from kernels.contract import registry
from trainer.contract import stopping

NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip


@pytest.mark.parametrize(("ends", "code"), [("000", 0), ("030", 3), ("052", 5), ("0x0", 1)])
def test_ranks_find_one_another_and_the_first_nonzero_exit_code_is_returned(
    tmp_path: Path, ends: str, code: int
) -> None:
    def run() -> int:
        rank = os.environ["RANK"]
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with socket.create_connection(place, 60):  # the store is this test's
            (tmp_path / rank).write_text(" ".join(os.environ[name] for name in NAMES))
        return int(ends[int(rank)])

    assert train_cases.run_ranks(len(ends), run) == code and "RANK" not in os.environ
    told = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert told == [f"{rank} {rank} 3 3 True 0" for rank in range(3)]


def test_delayed_threads_wait_before_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []
    monkeypatch.setattr(time, "sleep", order.append)
    for late in (train_cases.delay_threads(), contextlib.nullcontext()):
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
def test_run_tool_returns_the_exit_code_that_a_process_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    (tmp_path / "tool.py").write_text(f"import sys\nprint('said')\n{body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = sys.argv
    assert train_cases.run_tool(tmp_path, "tool", ["a", "b"]) == PROGRAMS[body] and sys.argv is before
    assert (tmp_path / "printed.txt").read_text() == "said\n"
    (tmp_path / "tool.py").unlink()


def test_a_perturbed_op_is_some_roundings_off_and_depends_on_the_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, up = (torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))

    def made(seed: int) -> list[torch.Tensor]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(registry, "bind_ops", registry.bind_ops)  # put back
            if seed:
                train_cases.perturb_op_results(seed)
            given = gate.clone().requires_grad_()
            result = registry.bind_ops({}).swiglu(given, up)
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


def test_results_written_in_place_have_relative_errors() -> None:
    op = registry.find_op("adamw")

    def written(seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(registry, "bind_ops", registry.bind_ops)
            if seed:
                train_cases.perturb_op_results(seed)
            inputs = tree_map_only(torch.Tensor, lambda x: x.detach().clone(), list(op.inputs(op.cases[0])))
            before = [x.clone() for x in tree_leaves([inputs[n] for n in op.writes])]
            registry.bind_ops({}).adamw(*inputs)
            return before, tree_leaves([inputs[n] for n in op.writes])

    (before, plain), (_, off), (_, other) = written(0), written(1), written(2)
    eps = torch.finfo(torch.float32).eps
    for old, exact, one, two in zip(before, plain, off, other, strict=True):
        still = exact == old
        assert torch.equal(one[still], old[still]) and bool(((one - exact).abs() <= 2 * eps * exact.abs()).all())
        if not bool(still.all()):
            assert bool((one != exact).any()) and bool((two != one).any())


def test_only_floats_are_perturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "bind_ops", registry.bind_ops)
    plain = registry.bind_ops({})
    train_cases.perturb_op_results(3)
    disturbed, ids = registry.bind_ops({}), torch.tensor([[1, 2]])
    assert disturbed.prepare_attention is plain.prepare_attention
    table = torch.ones(4, 8, dtype=torch.float64)
    assert torch.allclose(disturbed.embedding(ids, table), plain.embedding(ids, table), rtol=1e-14)
    assert disturbed.swiglu(torch.zeros(0, 4), torch.zeros(0, 4)).shape == (0, 4)


@pytest.mark.parametrize(
    ("stop_after", "ends", "code", "looks"),
    [(0, [0], 0, 0), (0, [3], 3, 0), (3, [75, 0], 0, 4), (3, [75, 2], 2, 4), (3, [0], 1000, 4), (1, [5], 1005, 2)],
)
def test_a_run_is_stopped_after_its_steps_and_started_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_after: int, ends: list[int], code: int, looks: int
) -> None:
    seen: list[list[str]] = []
    asked = stopping.is_stop_requested

    def main(words: list[str]) -> int:
        seen.append(words)
        if stop_after and len(seen) == 1:
            assert [stopping.is_stop_requested() for _ in range(looks + 1)] == [False] * (looks - 1) + [True] * 2
        else:
            assert stopping.is_stop_requested is asked
        return ends[len(seen) - 1]

    monkeypatch.setattr("trainer.__main__.main", main)
    assert train_cases.train_segment_folder(tmp_path, stop_after, waits=False, slow_threads=False) == code
    assert seen == [[str(tmp_path)]] * len(ends) and stopping.is_stop_requested is asked


def test_a_waiting_run_starts_twice_and_returns_the_larger_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, ends = [], iter([0, 3, 2, 0])
    monkeypatch.setattr(train_cases, "run_program", lambda *given: told.append(given) or next(ends))  # type: ignore[func-returns-value]
    assert [train_cases.train_segment_folder(tmp_path, 0, waits=True, slow_threads=False) for _ in "ab"] == [3, 2]
    assert told == [("trainer", ["--wait", str(tmp_path)])] * 4


def test_threads_are_delayed_only_during_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = threading.Thread.run
    monkeypatch.setattr(
        "trainer.__main__.main", lambda words: 7 if threading.Thread.run is not run and words == [str(tmp_path)] else 0
    )
    assert (
        train_cases.train_segment_folder(tmp_path, 0, waits=False, slow_threads=True) == 7
        and threading.Thread.run is run
    )
