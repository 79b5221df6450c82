"""Reads a file that untrusted code wrote: its type, size and links may be hostile.

The folder is given as a descriptor that was opened before the code ran. No link is followed, a pipe does not block, and at most
``limit`` bytes are read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from factory.core.faults import is_machine_fault_unrelated_to_files
from factory.core.untrusted_trainer_files import parse_json_object
from kernels.contract.message import CodedError


class UntrustedFileError(CodedError):
    """A file of untrusted code is missing or wrong. ``__cause__`` is None, so that the error is never taken for a fault of the machine."""


def make_unreadable_file_error(name: str, error: BaseException) -> UntrustedFileError:
    """Return the error for a file that cannot be read."""
    return UntrustedFileError("runs.unreadable", "{file} cannot be read: {error}", file=name, error=str(error)[:300])


def make_missing_file_error(name: str, error: OSError) -> UntrustedFileError:
    """Return the error for a missing file or folder."""
    return UntrustedFileError("runs.missing", "{file} is missing: {error}", file=name, error=error.strerror)


def make_not_regular_file_error(name: str) -> UntrustedFileError:
    """Return the error for a link, a pipe or another special file."""
    return UntrustedFileError("runs.not_regular", "{file} is not a regular file", file=name)


def read_tensors(folder: int, parts: Sequence[str], limit: int) -> dict[str, torch.Tensor]:
    """Return the tensors of the safetensors file at ``parts`` (as in ``read_bytes``), by name. Raises: UntrustedFileError."""
    return parse_tensors(read_bytes(folder, parts, limit), parts[-1])


def parse_tensors(content: bytes, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors in the content of a safetensors file. ``name``: the file's name for the error. Raises: UntrustedFileError."""
    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError, RuntimeError, MemoryError) as error:
        raise make_unreadable_file_error(name, error) from None


def read_untrusted_json_object(folder: int, parts: Sequence[str], limit: int) -> dict[str, Any]:
    """Return the JSON object in the file at ``parts`` (as in ``read_bytes``). Raises: UntrustedFileError."""
    return parse_untrusted_json_object(read_bytes(folder, parts, limit), parts[-1])


def parse_untrusted_json_object(content: bytes, name: str) -> dict[str, Any]:
    """Return the JSON object in the content of a file. ``name``: the file's name for the error. Raises: UntrustedFileError."""
    try:
        return parse_json_object(content)
    except ValueError as error:
        raise make_unreadable_file_error(name, error) from None


def read_bytes(folder: int, parts: Sequence[str], limit: int) -> bytes:
    """Return the content of the file ``parts[0]/…/parts[-1]`` below the folder of a descriptor. At most ``limit`` bytes are allowed.

    Raises: UntrustedFileError; OSError for a fault of the machine.
    """
    with open_untrusted_file(folder, parts, limit) as file:
        return file.read(limit + 1)[:limit]


@contextmanager
def open_untrusted_file(folder: int, parts: Sequence[str], limit: int) -> Iterator[BinaryIO]:
    """Open a file as ``read_bytes`` does, and close it after the block. An error of the block's reads is raised in the same way."""
    opened: list[int] = []
    try:
        inner = folder
        for name in parts[:-1]:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=inner)
            opened.append(inner)
        handle = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=inner)
        opened.append(handle)
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise make_not_regular_file_error(parts[-1])
        if status.st_size > limit:
            raise UntrustedFileError(
                "runs.file_too_large",
                "{file} has {size} bytes; at most {limit} are allowed",
                file=parts[-1], size=status.st_size, limit=limit,
            )  # fmt: skip
        with os.fdopen(os.dup(handle), "rb") as file:
            yield file
    except OSError as error:
        leased = isinstance(error, BlockingIOError)  # the candidate may hold a lease on the file
        if is_machine_fault_unrelated_to_files(error) and not leased:
            raise
        raise make_missing_file_error(parts[-1], error) from None
    except MemoryError as error:
        raise make_unreadable_file_error(parts[-1], error) from None
    finally:
        for descriptor in opened:
            os.close(descriptor)
