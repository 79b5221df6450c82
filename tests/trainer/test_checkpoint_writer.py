"""Saving checkpoints during training: where copies are, when their memory may be overwritten, and what the files contain."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.file_hashes import file_hashes
from tests.support.trainer.segments import MakeShard
from tests.support.trainer.small_models import run_of
from trainer import checkpoint_writer, locked_memory
from trainer.batch import make_batch
from trainer.checkpoint_writer import ALIGNED, CheckpointWriter, count_host_bytes, iterate_checkpoint_tensors
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.format import Tensors
from trainer.locked_memory import HostMemory

EXPERTS = {"count": 4, "per_token": 2, "d_ff": 32, "dense_layers": 1, "shared": 1}
Contents = dict[str, Tensors]


def contents_of(step: int) -> Contents:
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(7, 30, generator=generator)
    model = {"a": weight, "turned": weight.t(), "half": weight.bfloat16(), "none": torch.empty(0, 3)}
    return {"model": model, "optimizer": {"step.a": torch.tensor(float(step)), "rng": torch.get_rng_state()}}


def submit(writer: CheckpointWriter, step: int, contents: Contents | None = None) -> None:
    writer.begin_save(step, contents or contents_of(step), {}, {"step": step})


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """Of each save: (address, bytes) of the copies that are written to disk."""
    found: list[list[tuple[int, int]]] = []
    save_share = checkpoint_writer.save_rank_share

    def noted(parent: Path, step: int, copied: Contents, *rest: Any) -> Path:
        found.append([(tensor.data_ptr(), tensor.nbytes) for _, _, tensor in iterate_checkpoint_tensors(copied)])
        return save_share(parent, step, copied, *rest)

    monkeypatch.setattr(checkpoint_writer, "save_rank_share", noted)
    return found


def test_reserved_memory_is_used_by_every_save_and_changes_no_byte_of_the_files(
    tmp_path: Path, written: list[list[tuple[int, int]]]
) -> None:
    size = count_host_bytes(tensor for _, _, tensor in iterate_checkpoint_tensors(contents_of(1)))
    plain, reserved = (
        CheckpointWriter(tmp_path / "plain", keep=3),
        CheckpointWriter(tmp_path / "reserved", keep=3, reserve=size),
    )
    for writer in (reserved, plain):
        for step in (1, 2, 3):
            submit(writer, step)
        writer.wait_for_last_save()
        writer.close()
    first = written[0]
    assert written[:3] == [first] * 3
    places = sorted(place for place in first if place[1])
    assert all(address % ALIGNED == 0 for address, _ in places) and places[0][0] % mmap.PAGESIZE == 0
    assert all(address + bytes_ <= after for (address, bytes_), (after, _) in zip(places, places[1:]))
    assert places[-1][0] + places[-1][1] <= places[0][0] + size < places[-1][0] + places[-1][1] + ALIGNED
    for step in (1, 2, 3):
        folder = checkpoints.format_checkpoint_name(step)
        assert file_hashes(tmp_path / "plain" / folder) == file_hashes(tmp_path / "reserved" / folder)
        loaded = checkpoints.load_checkpoint(tmp_path / "reserved" / folder)
        assert all(torch.equal(tensor, loaded.model[name]) for name, tensor in contents_of(step)["model"].items())


def test_the_last_save_on_a_cpu_writes_the_same_bytes_without_a_copy(
    tmp_path: Path, written: list[list[tuple[int, int]]]
) -> None:
    contents = contents_of(1)
    for folder, is_last in (("copied", False), ("last", True)):
        writer = CheckpointWriter(tmp_path / folder, keep=3)
        writer.begin_save(1, contents, {}, {"step": 1}, is_last)
        writer.wait_for_last_save()
        writer.close()
    held = [(tensor.data_ptr(), tensor.nbytes) for _, _, tensor in iterate_checkpoint_tensors(contents)]
    assert written[1] == held and not {at for at, size in written[0] if size} & {at for at, size in held if size}
    assert file_hashes(tmp_path / "copied") == file_hashes(tmp_path / "last")


def test_the_next_save_uses_the_memory_of_a_save_that_failed(
    tmp_path: Path, written: list[list[tuple[int, int]]]
) -> None:
    writer = CheckpointWriter(tmp_path / "checkpoints", keep=2, reserve=1 << 16)
    (tmp_path / "checkpoints").touch()  # where a folder would be made
    submit(writer, 1)
    with pytest.raises(FileExistsError):
        submit(writer, 2)
    (tmp_path / "checkpoints").unlink()
    submit(writer, 3)
    assert writer.wait_for_last_save() == tmp_path / "checkpoints" / "step-00000003"
    writer.close()
    assert len(written) == 2 and written[0] == written[1]
    assert torch.equal(
        checkpoints.load_checkpoint(tmp_path / "checkpoints" / "step-00000003").model["a"], contents_of(3)["model"]["a"]
    )


def test_memory_is_not_written_again_while_the_disk_still_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go = threading.Event(), threading.Event()
    save_share = checkpoint_writer.save_rank_share

    def slow(*arguments: Any) -> Path:
        reached.set()
        assert go.wait(timeout=60)
        return save_share(*arguments)

    monkeypatch.setattr(checkpoint_writer, "save_rank_share", slow)
    writer = CheckpointWriter(tmp_path, keep=2, reserve=1 << 16)
    weight = torch.ones(1000)
    submit(writer, 1, {"model": {"w": weight}, "optimizer": {}})
    writer.wait_until_copied()
    assert reached.wait(timeout=60)
    weight += 1
    second = threading.Thread(target=submit, args=(writer, 2, {"model": {"w": weight}, "optimizer": {}}))
    second.start()
    second.join(timeout=0.2)  # it would be through by now
    go.set()
    second.join()
    writer.wait_for_last_save()
    writer.close()
    found = [
        float(checkpoints.load_checkpoint(path).model["w"].unique())
        for _, path in checkpoints.list_checkpoints(tmp_path)
    ]
    assert found == [1.0, 2.0]


def test_memory_grows_for_a_save_that_needs_more(tmp_path: Path, written: list[list[tuple[int, int]]]) -> None:
    writer = CheckpointWriter(tmp_path, keep=4, reserve=1)
    for step, size in enumerate((10, 100_000, 10, 100_000), start=1):
        submit(writer, step, {"model": {"w": torch.full((size,), float(step))}, "optimizer": {}})
    writer.wait_for_last_save()
    writer.close()
    assert written[1] == written[3] and written[1][0][0] == written[2][0][0]
    for step, path in checkpoints.list_checkpoints(tmp_path):
        assert float(checkpoints.load_checkpoint(path).model["w"].unique()) == step


@pytest.mark.parametrize("changes", [{}, {"optimizer__name": "muon", "model__experts": EXPERTS}], ids=["adamw", "muon"])
def test_checkpoint_bytes_before_the_first_step_is_the_size_of_every_checkpoint(
    tmp_path: Path, make_shard: MakeShard, written: list[list[tuple[int, int]]], changes: dict[str, Any]
) -> None:
    run = run_of(tmp_path, make_shard, **changes)
    size = run.count_checkpoint_bytes()
    writer = run.writer = CheckpointWriter(tmp_path / "checkpoints", keep=2, reserve=size)
    for _ in range(2):
        run.train_step(make_batch(run.order))
        run.save()
    run.train_step(make_batch(run.order))  # its update waits for the copy
    writer.wait_for_last_save()
    writer.close()
    contents, _ = run.collect_checkpoint_contents()
    assert (
        count_host_bytes(tensor for _, _, tensor in iterate_checkpoint_tensors(contents)) == size
        and written[0] == written[1]
    )


@pytest.mark.parametrize("code", [0, 801])
def test_pages_are_locked_once_and_unlocked_or_a_failure_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    """The two calls of CUDA are replaced by their results."""
    calls: list[tuple[str, int]] = []

    def call(name: str, result: int) -> Callable[[Tensor], int]:
        return lambda memory: calls.append((name, memory.data_ptr())) or result  # type: ignore[func-returns-value]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(locked_memory, "lock_pages", call("lock", code))
    monkeypatch.setattr(locked_memory, "unlock_pages", call("unlock", 0))
    memory = HostMemory()
    first = memory.reserve(5000)
    assert memory.reserve(100) is first and len(first) >= 5000
    second = memory.reserve(50_000)
    first[:], second[:] = 1, 2  # both are there
    memory.release()
    memory.release()
    locks, unlocks = ([at for name, at in calls if name == wanted] for wanted in ("lock", "unlock"))
    assert locks == [first.data_ptr(), second.data_ptr()]
    assert unlocks == ([] if code else locks)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == (2 if code else 0) and all("CUDA error 801" in line and "pageable" in line for line in said)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpus_tensors_are_saved_from_locked_memory(tmp_path: Path, written: list[list[tuple[int, int]]]) -> None:
    on_gpu = {kind: {name: t.cuda() for name, t in tensors.items()} for kind, tensors in contents_of(1).items()}
    writer = CheckpointWriter(tmp_path / "gpu", keep=3, reserve=1 << 16)
    for step in (1, 2):
        submit(writer, step, on_gpu)
    writer.wait_for_last_save()
    assert writer._memory is not None and writer._memory.locked
    writer.close()
    assert written[0] == written[1]
    loaded = checkpoints.load_checkpoint(tmp_path / "gpu" / "step-00000002")
    assert all(torch.equal(tensor, loaded.model[name]) for name, tensor in contents_of(1)["model"].items())
