"""Counts how often a step waits for the device. Without a GPU it counts the operations that would wait on a GPU."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import trainer.run
from benchmarks.support import waits as waits_on_gpu
from kernels.contract.choice import split_implementation_names
from kernels.contract.registry import OPS, bind_ops, find_implementations_in_use, load_choice
from tests.support.paths import ROOT
from tests.support.trainer.segments import MakeShard, plan_of, recipe_with, write_spec
from trainer.batch import make_batch
from trainer.contract.plan.spec import SegmentSpec
from trainer.parallel.ranks import Ranks
from trainer.run import SegmentRun

aten = torch.ops.aten
# Their result's size, or the result itself, is the host's to know; ``lift_fresh`` is a tensor made of Python's values, which is copied.
WAITING = {
    aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select, aten.bincount, aten._unique, aten._unique2,
    aten.unique_dim, aten.unique_consecutive, aten.unique_dim_consecutive, aten.lift_fresh, aten.lift_fresh_copy,
}  # fmt: skip
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
READING = ("tolist", "numpy", "cpu", "__array__")  # of a tensor in host memory torch calls no operation


class Waits(TorchDispatchMode):
    """``found``: one line for each, what and where."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        by_mask = packet in INDEXING and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        uneven = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        if packet in WAITING or by_mask or uneven:
            self.note(str(func))
        if func.namespace in ("aten", "prim", "prims"):
            return func(*args, **kwargs)
        with self:  # an op of ours: what it is made of
            return func(*args, **kwargs)

    def note(self, what: str) -> None:
        own = [f for f in traceback.extract_stack() if Path(f.filename).is_relative_to(ROOT) and f.filename != __file__]
        where = [f"{Path(f.filename).relative_to(ROOT)} {f.name}" for f in own if "site-packages" not in f.filename]
        self.found.append(f"{what} in {where[-1] if where else 'a test'}")


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    waits = Waits()
    with monkeypatch.context() as patch, waits:
        for name in READING:
            usual = getattr(Tensor, name)

            def noted(tensor: Tensor, *rest: Any, name: str = name, usual: Any = usual, **named: Any) -> Any:
                waits.note(name)
                return usual(tensor, *rest, **named)

            patch.setattr(Tensor, name, noted)
        yield waits.found


def test_every_operation_that_would_wait_for_a_gpu_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(6.0)
    with counted(monkeypatch) as found:
        bool(x[0]), float(x[1]), x[2].item(), x.tolist(), x.numpy(), x.cpu(), torch.equal(x, x), x[x > 2], x.unique()
        x.nonzero(), torch.tensor([1, 2]), x.repeat_interleave(torch.arange(6)), x.masked_select(x > 1)
        x[x > 2] = x[:3].clone()
        assert len(found) == 14
        x.sum() + 1, torch.where(x > 0, x, 0.0), torch.arange(3), x.repeat_interleave(2), x[torch.arange(3)], x.sort()
        assert len(found) == 14, found[14:]


EXPERTS = {"count": 4, "per_token": 2, "d_ff": 32, "dense_layers": 1, "shared": 1}
RUNS: dict[str, dict[str, Any]] = {
    "dense, AdamW": {},
    "experts, Muon": {"optimizer__name": "muon", "model__experts": EXPERTS, "precision": "bf16"},
    "micro-batches, recomputed": {"batch__micro_sequences": 2, "parallel__recompute": "block"},
}


@pytest.fixture
def kernels(tmp_path: Path) -> str:
    """A kernels.yaml: what a GPU runs, where a CPU can run it too; else the op's reference."""
    lines = ["cpu:"]
    for name, choice in load_choice(ROOT / "policies" / "kernels.yaml", "cuda").items():
        chosen = split_implementation_names(choice)[0]
        lines.append(f"  {name}: {chosen if OPS[name].implementation(chosen).can_run_on('cpu') else 'reference'}")
    (tmp_path / "kernels.yaml").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "kernels.yaml")


def make_run(folder: Path, make_shard: MakeShard, kernels: str, device: str, changes: dict[str, Any]) -> SegmentRun:
    plan = plan_of(make_shard(counts={"code": 600, "docs": 200, "chat": 200}))
    spec = SegmentSpec.load(write_spec(folder / "run", plan, recipe_with(**changes), kernels=kernels))
    return SegmentRun(spec, Ranks(0, 1, torch.device(device)), None)


@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_a_step_waits_for_the_device_once(
    tmp_path: Path, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch, kernels: str, changes: dict[str, Any]
) -> None:
    """Some of the steps measure a layer, and some are split for the noise scale."""
    run = make_run(tmp_path, make_shard, kernels, "cpu", changes)
    measured = []
    for _ in range(5):
        batch = make_batch(run.order)
        with counted(monkeypatch) as found:
            record = run.train_step(batch)
        assert found == ["tolist in trainer/monitor/hook.py copy_numbers_to_host"]
        measured.append((any(key.startswith("update_ratio/") for key in record), run._rows_at_once(batch)[1]))
    assert {turn for turn, _ in measured} == {True, False}
    assert "batch__micro_sequences" in changes or {split for _, split in measured} == {True, False}


class HostTensors(TorchDispatchMode):
    """``found``: operations of tensors in host memory, which read, copy or make one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self if func.namespace == "factory" else nullcontext():
            made = func(*args, **(kwargs or {}))
        if any(isinstance(x, Tensor) and x.device.type == "cpu" for x in tree_leaves((args, kwargs, made))):
            self.found.append(str(func))
        return made


@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_a_step_touches_nothing_in_host_memory_but_its_batch(
    tmp_path: Path, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch, kernels: str, changes: dict[str, Any]
) -> None:
    """The step runs on torch's ``meta`` device, which like a GPU does not share host memory. A tensor that the step read or made in host memory would
    be a copy that waits. The batch is one copy. Tensors on ``meta`` have no values, so the record consists of ones."""
    for name, usual in (("bind_ops", bind_ops), ("find_implementations_in_use", find_implementations_in_use)):
        on_cpu = lambda choice, device, *rest, usual=usual: usual(choice, "cpu", *rest)
        monkeypatch.setattr(trainer.run, name, on_cpu)
    monkeypatch.setattr(trainer.run, "load_choice", lambda path, device: load_choice(path, "cpu"))
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: [1.0] * tensor.numel())
    run = make_run(tmp_path, make_shard, kernels, "meta", changes)
    for _ in range(5):
        batch = make_batch(run.order)
        with HostTensors() as mode:
            moved = batch.to(run.ranks.device)
            assert mode.found.count("aten._to_copy.default") == 1
            mode.found.clear()
            run.train_step(moved)
        assert mode.found == []


def test_waits_are_reported_with_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's test warning is raised in C++, like the warning about a wait for a GPU. Without a GPU the debug mode cannot be set."""
    modes: list[str | int] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(waits_on_gpu, "NOTICE", "Test message for TORCH_WARN")

    def step() -> None:
        torch._C._warn()
        torch._C._warn()
        warnings.warn("something else", stacklevel=1)

    with pytest.warns(UserWarning, match="something else") as others:
        found = waits_on_gpu.waits(step)
    line = step.__code__.co_firstlineno
    assert found == [f"tests/trainer/test_waits.py:{line + n} step" for n in (1, 2)] and len(others) == 1
    assert modes == ["warn", 0]
    with pytest.raises(ZeroDivisionError):
        waits_on_gpu.waits(lambda: 1 / 0)
    assert modes == ["warn", 0] * 2
