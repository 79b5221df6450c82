"""Reads a file that a candidate wrote, without trusting that it is a file, its size, or where it leads.

The folder is entered through a descriptor opened before the candidate ran; no link is followed, a pipe does not block, and at most
``limit`` bytes are read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from factory.core.faults import is_of_no_file
from factory.core.left_files import parse_json_object


class UntrustedFileError(Exception):
    """Says what is wrong with the file, for a report. It names no cause: what untrusted code left is never taken for a fault of the machine."""


def read_tensors(folder: int, parts: Sequence[str], limit: int) -> dict[str, torch.Tensor]:
    """The tensors of the safetensors file ``parts``, as ``read_bytes`` finds it. Raises: UntrustedFileError."""
    return tensors_of(read_bytes(folder, parts, limit), parts[-1])


def tensors_of(stored: bytes, name: str) -> dict[str, torch.Tensor]:
    """Raises: UntrustedFileError."""
    try:
        return load(stored)
    except (SafetensorError, ValueError, KeyError, RuntimeError, MemoryError) as error:
        raise UntrustedFileError(f"{name} cannot be read: {str(error)[:300]}") from None


def read_object(folder: int, parts: Sequence[str], limit: int) -> dict[str, Any]:
    """The JSON object in the file ``parts``, as ``read_bytes`` finds it. Raises: UntrustedFileError."""
    return object_of(read_bytes(folder, parts, limit), parts[-1])


def object_of(stored: bytes, name: str) -> dict[str, Any]:
    """Raises: UntrustedFileError."""
    try:
        return parse_json_object(stored)
    except ValueError as error:
        raise UntrustedFileError(f"{name} cannot be read: {str(error)[:300]}") from None


def read_bytes(folder: int, parts: Sequence[str], limit: int) -> bytes:
    """The file ``parts[0]/…/parts[-1]`` below the descriptor's folder. Raises: UntrustedFileError; OSError for a fault that no file can cause."""
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
            raise UntrustedFileError(f"{parts[-1]} is not a regular file")
        if status.st_size > limit:
            raise UntrustedFileError(f"{parts[-1]} has {status.st_size} bytes, at most {limit} are allowed")
        with os.fdopen(os.dup(handle), "rb") as file:
            return file.read(limit + 1)[:limit]
    except OSError as error:
        if is_of_no_file(error) and not isinstance(
            error, BlockingIOError
        ):  # that is a lease, which the candidate may hold
            raise
        raise UntrustedFileError(f"{parts[-1]} is not there: {error.strerror}") from None
    except MemoryError as error:
        raise UntrustedFileError(f"{parts[-1]} cannot be read: {str(error)[:300]}") from None
    finally:
        for descriptor in opened:
            os.close(descriptor)
