"""Reading a candidate's files always ends, follows no link and runs no code."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from factory.core.faults import NO_FILE_HANDLES, find_fault_in, is_machine_fault
from factory.runs.untrusted_files import UntrustedFileError, read_tensors
from tests.support.failing.limits import few_handles
from tests.support.messages import refused

LIMIT = 4096
NAME = "answer.safetensors"


class Payload:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return os.system, (f"touch {os.environ['ATTACK_MARK']}",)


def _linked(file: Path) -> None:
    save_file({"x": torch.ones(2)}, file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda file: None, "runs.missing"),
    "a pickle": (lambda file: file.write_bytes(pickle.dumps(Payload())), "runs.unreadable"),
    "a pickle of torch": (lambda file: torch.save(Payload(), file), "runs.unreadable"),
    "a link": (_linked, "runs.missing"),
    "a pipe": (os.mkfifo, "runs.not_regular"),
    "a folder": (Path.mkdir, "runs.not_regular"),
    "a socket's end": (lambda file: os.mknod(file, 0o140644), "runs.missing"),
    "gigabytes of holes": (lambda file: (file.touch(), os.truncate(file, 1 << 34)), "runs.file_too_large"),
    "empty": (Path.touch, "runs.unreadable"),
    "a header longer than the file": (
        lambda file: file.write_bytes(struct.pack("<Q", 1 << 60) + b"{}"),
        "runs.unreadable",
    ),
    "a tensor beyond the end": (
        lambda file: file.write_bytes(save({"x": torch.ones(8)})[:-16]),
        "runs.unreadable",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_without_tensors_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "ran"
    monkeypatch.setenv("ATTACK_MARK", str(mark))
    folder = tmp_path / "out"
    folder.mkdir()
    make, code = FILES[name]
    make(folder / NAME)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with refused(code, UntrustedFileError, file=NAME) as raised:
            read_tensors(handle, (NAME,), LIMIT)
    finally:
        os.close(handle)
    assert not mark.exists() and not is_machine_fault(raised.value), "a candidate cannot make the factory wait"


def test_a_lack_of_file_handles_is_not_blamed_on_the_candidate(tmp_path: Path) -> None:
    save_file({"x": torch.arange(3)}, tmp_path / NAME)
    handle = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with few_handles(), pytest.raises(OSError) as raised:
            read_tensors(handle, (NAME,), LIMIT)
        assert find_fault_in(raised.value) == NO_FILE_HANDLES and read_tensors(handle, (NAME,), LIMIT)[
            "x"
        ].tolist() == [
            0,
            1,
            2,
        ]
    finally:
        os.close(handle)


def test_a_folder_replaced_by_a_link_is_still_read_through_its_descriptor(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    (folder / "inner").mkdir(parents=True)
    save_file({"x": torch.arange(3)}, folder / "inner" / NAME)
    (folder / "link").symlink_to("inner")
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    folder.rename(tmp_path / "moved")  # the name may lead elsewhere by now; the descriptor does not
    (tmp_path / "out").symlink_to("/etc")
    try:
        assert read_tensors(handle, ("inner", NAME), LIMIT)["x"].tolist() == [0, 1, 2]
        with refused("runs.missing", UntrustedFileError):
            read_tensors(handle, ("link", NAME), LIMIT)
        with refused("runs.missing", UntrustedFileError) as raised:
            read_tensors(handle, ("inner", NAME, NAME), LIMIT)  # a file where a folder belongs
        assert not is_machine_fault(raised.value)
    finally:
        os.close(handle)
