"""The safetensors format: reading a header that is not trusted, one tensor at a time, and writing tensors that are not all in memory.

A file is 8 bytes (the header's length, little-endian), a JSON header ``{name: {dtype, shape, data_offsets}}``, then the tensors without gaps.
Tensors are read in pieces, not memory-mapped: a mapped file that another program cuts short ends the reading process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.adapters.config_reader import ModelFilesError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST_HEADER_BYTES = 1 << 24  # 18,867 tensors take 3 MB
PIECE_VALUES = 1 << 18  # values that are read, checked and converted at once: 1 MiB of fp32
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "I32": 4, "U8": 1}
TORCH_NAMES = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "I64": "int64", "I32": "int32", "U8": "uint8",
}  # fmt: skip
LFS_BEGIN = b"version https://git-lfs.github.com/spec/"  # of a pointer (docs/spec.md of Git LFS)
MOST_LFS_BYTES = 1024
WEIGHTS = ("BF16", "F16", "F32")  # dtypes that fp32 holds exactly
Layout = Mapping[str, tuple["torch.dtype", tuple[int, ...]]]  # of a file's tensors, in its order


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is. ``start``: of its first byte in the file."""

    file: Path
    dtype: str  # by safetensors' name
    shape: tuple[int, ...]
    start: int

    @property
    def values(self) -> int:
        return math.prod(self.shape)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name. No tensor is read. Raises: ModelFilesError that names the file; OSError."""
    refuse_lfs_pointer(file)
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > size - 8:
            raise ModelFilesError(
                "models.truncated_header",
                "{file}: the file ends inside its header ({bytes} bytes). Copy or download it again",
                file=file,
                bytes=size,
            )
        if length > MOST_HEADER_BYTES:
            raise ModelFilesError(
                "models.huge_header",
                "{file}: the header has {bytes:,} bytes. At most {most:,} are read. Copy or download the file again",
                file=file,
                bytes=length,
                most=MOST_HEADER_BYTES,
            )
        encoded = opened.read(length)
    try:
        header = json.loads(encoded, object_pairs_hook=refuse_double_keys)
        header.pop("__metadata__", None)
        found = {name: _parse_entry(file, entry, 8 + length) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelFilesError(
            "models.damaged_header",
            "{file}: the header is not one of safetensors: {problem}. Copy or download the file again",
            file=file,
            problem=str(error)[:200],
        ) from None
    _check_places(file, found, 8 + length, size)
    return found


def refuse_lfs_pointer(file: Path) -> None:
    """Raises: ModelFilesError if a file is a pointer of Git LFS, which a clone without Git LFS leaves in place of a large file; OSError."""
    if file.stat().st_size > MOST_LFS_BYTES:
        return
    with open(file, "rb") as opened:
        is_pointer = opened.read(len(LFS_BEGIN)) == LFS_BEGIN
    if is_pointer:
        raise ModelFilesError(
            "models.lfs_pointer",
            "{file} is only a pointer of Git LFS, not the file itself. Install Git LFS, then type 'git lfs pull' in {folder}",
            file=file,
            folder=file.parent,
        )


def refuse_double_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a mapping, for ``json.loads``. Raises: ValueError if a key occurs twice, because programs read one or the other."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return found


def _parse_entry(file: Path, entry: dict[str, Any], data: int) -> StoredTensor:
    dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and 0 <= number < 1 << 48 for number in (*shape, start, stop)) or len(shape) > 8:
        raise ValueError(f"shape {entry['shape']}, data_offsets {entry['data_offsets']}")
    if stop - start != math.prod(shape) * SIZES.get(dtype, 0) and dtype in SIZES:
        raise ValueError(f"{dtype} of shape {list(shape)} does not take {stop - start} bytes")
    # a tensor of another dtype keeps its place, so that the message can name it
    return StoredTensor(file, str(dtype)[:16], shape if dtype in SIZES else (stop - start,), data + start)


def _check_places(file: Path, tensors: Mapping[str, StoredTensor], start: int, size: int) -> None:
    """Each byte after the header belongs to one tensor."""
    place, before = start, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].values)):
        if tensor.start != place:
            raise ModelFilesError(
                "models.overlapping",
                "{file}: the places of {tensor} and {before} overlap, or leave a gap. Copy or download the file again",
                file=file,
                tensor=name[:120],
                before=before[:120] or "the header",
            )
        place, before = place + tensor.values * SIZES.get(tensor.dtype, 1), name
    if size != place:
        raise ModelFilesError(
            "models.other_length",
            "{file}: the file has {bytes:,} bytes, but its header describes {expected:,}. Copy or download it again",
            file=file,
            bytes=size,
            expected=place,
        )


def read_tensor(name: str, stored: StoredTensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor in ``dtype`` (None: fp32), read and converted in pieces, so that memory holds it once.

    Its dtype must be one of ``WEIGHTS``. Raises: ModelFilesError if a value is NaN or infinite, or if the file became shorter; OSError.
    """
    import torch

    assert stored.dtype in WEIGHTS, (name, stored.dtype)
    found = torch.empty(stored.values, dtype=dtype or torch.float32)
    theirs: torch.dtype = getattr(torch, TORCH_NAMES[stored.dtype])
    unusable = 0
    with open(stored.file, "rb", buffering=0) as opened:
        opened.seek(stored.start)
        buffer = torch.empty(min(stored.values, PIECE_VALUES), dtype=theirs)
        for first in range(0, stored.values, PIECE_VALUES):
            piece = buffer[: stored.values - first]
            _read_all(opened, piece.view(torch.uint8).numpy().data, stored.file)
            unusable += len(piece) - int(piece.isfinite().sum())
            found[first : first + len(piece)] = piece
    if unusable:
        raise ModelFilesError(
            "models.not_finite",
            "{file}: {count:,|value|values} of tensor {tensor} are NaN or infinite. The model is damaged. Use another copy of it",
            file=stored.file,
            tensor=name,
            count=unusable,
        )
    return found.view(stored.shape)


def _read_all(opened: Any, into: memoryview, file: Path) -> None:
    while into:
        count = opened.readinto(into)
        if not count:
            raise ModelFilesError("models.cut_short", "{file}: the file became shorter while it was read", file=file)
        into = into[count:]


def iterate_safetensors(
    layout: Layout, tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file in pieces. ``layout`` says in advance what ``tensors`` yields, in the same order; each is converted to its
    dtype there. The bytes can be hashed while they are written, and a full disk is an OSError."""
    import torch

    names = {getattr(torch, ours): theirs for theirs, ours in TORCH_NAMES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape) in layout.items():
        size = math.prod(shape) * SIZES[names[dtype]]
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little") + encoded
    left = iter(tensors)
    for name, (dtype, shape) in layout.items():
        given, tensor = next(left)
        assert (given, tuple(tensor.shape)) == (name, shape), (given, tuple(tensor.shape), name, shape)
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        for first in range(0, len(flat), PIECE_VALUES):
            # a copy: a view that the caller still has would keep this tensor while the next one is made
            yield flat[first : first + PIECE_VALUES].to(dtype, copy=True).view(torch.uint8).numpy().data
        del tensor, flat  # before the next one is made


def split_into_shards(layout: Layout, most_bytes: int) -> list[list[str]]:
    """The names of each file's tensors, in order. A file has at most ``most_bytes``, or one tensor.

    >>> import torch
    >>> split_into_shards({"a": (torch.float32, (2,)), "b": (torch.float32, (1,)), "c": (torch.float32, (4,))}, 12)
    [['a', 'b'], ['c']]
    """
    shards: list[list[str]] = [[]]
    held = 0
    for name, (dtype, shape) in layout.items():
        size = math.prod(shape) * dtype.itemsize
        if shards[-1] and held + size > most_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def write_weights(
    folder: Path, layout: Layout, tensors: Iterable[tuple[str, Tensor]], most_bytes: int | None = None
) -> list[str]:
    """Write ``model.safetensors``, or several files of at most ``most_bytes`` and their index. Memory holds one tensor. Returns the files' names.

    Raises: OSError.
    """
    shards = split_into_shards(layout, most_bytes) if most_bytes else [list(layout)]
    names = [
        "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    left = iter(tensors)
    for name, held in zip(names, shards):
        part = {key: layout[key] for key in held}
        with open(folder / name, "wb") as file:
            for piece in iterate_safetensors(part, _take(left, len(held)), {"format": "pt"}):
                file.write(piece)
    assert next(left, None) is None, "more tensors than the layout says"
    if len(shards) > 1:
        total = sum(math.prod(shape) * dtype.itemsize for dtype, shape in layout.values())
        weight_map = {key: name for name, held in zip(names, shards) for key in held}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return names


def _take(tensors: Iterator[tuple[str, Tensor]], count: int) -> Iterator[tuple[str, Tensor]]:
    """The next ``count``. ``itertools.islice`` would keep the last one."""
    for _ in range(count):
        yield next(tensors)
