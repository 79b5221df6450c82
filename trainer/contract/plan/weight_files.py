"""The tensors of a model's safetensors files, from their headers alone, compared with the description of the model.

A header is a few hundred kilobytes of a file of gigabytes: eight bytes with its length, then JSON with the dtype, shape and place of each tensor.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.contract.message import Message
from trainer.contract.errors import RecipeError
from trainer.contract.plan.hf_config import PublicModel

INDEX, ALONE = "model.safetensors.index.json", "model.safetensors"
LONGEST_HEADER = 100_000_000  # bytes: the limit of the format
GUESSED_WITHIN = 0.02  # share by which sizes that were read by key names may be off: norms and biases are guessed
# Tensors that some files hold besides the weights: they follow from config.json.
COMPUTED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a folder by name, with their shapes."""

    shapes: dict[str, tuple[int, ...]]
    bytes: int  # of all tensors, as they are stored
    files: int

    @property
    def elements(self) -> int:
        """Number of values of all tensors."""
        return sum(map(math.prod, self.shapes.values()))


def read_weight_files(folder: Path) -> WeightFiles | None:
    """The tensors of a folder; None if it has no safetensors file. If there is an index, it decides which files count.

    Raises: RecipeError that names the file: a missing or truncated one, or one whose header cannot be read.
    """
    names = [ALONE] if (folder / ALONE).exists() else sorted(path.name for path in folder.glob("*.safetensors"))
    index = folder / INDEX
    if index.exists():
        try:
            names = sorted({str(name) for name in json.loads(index.read_text("utf-8"))["weight_map"].values()})
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(index, Message("plan.bad_index", "it has no mapping weight_map")) from error
    shapes: dict[str, tuple[int, ...]] = {}
    size = 0
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise _unreadable(folder / name, Message("plan.missing_shard", "the file does not exist"))
        for tensor, (shape, count) in _read_header(folder / name).items():
            if tensor in shapes:
                raise _unreadable(
                    folder / name, Message("plan.twice", "another file holds the tensor {name} too", name=tensor)
                )
            shapes[tensor] = shape
            size += count
    return WeightFiles(shapes, size, len(names)) if names else None


def _read_header(path: Path) -> dict[str, tuple[tuple[int, ...], int]]:
    """{name: (shape, bytes)}. The last tensor must end where the file ends."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(LONGEST_HEADER, path.stat().st_size):
                raise ValueError(length)
            header: Any = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = {
            str(name): (tuple(int(n) for n in one["shape"]), int(one["data_offsets"][1] - one["data_offsets"][0]))
            for name, one in header.items()
        }
        end = 8 + length + max((int(one["data_offsets"][1]) for one in header.values()), default=0)
    except OSError as error:
        raise _unreadable(path, Message("plan.no_weights_read", "{problem}", problem=error.strerror)) from None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _unreadable(path, Message("plan.bad_header", "it is not a safetensors file")) from error
    if end != path.stat().st_size:
        raise _unreadable(
            path,
            Message(
                "plan.truncated",
                "its header describes {end:,} bytes, but the file has {size:,}",
                end=end,
                size=path.stat().st_size,
            ),
        )
    return found


def refuse_other_weights(public: PublicModel, found: WeightFiles, folder: Path) -> None:
    """Raises: RecipeError that names both numbers of parameters, and the first tensor that differs, if the files hold another model than config.json
    describes. Of a family that no adapter knows, the numbers alone are compared."""
    spec, family = public.spec, public.family
    if family is None:
        if abs(found.elements / spec.parameters - 1) > GUESSED_WITHIN:
            raise _other(folder, found.elements, spec.parameters, "")
        return
    wanted = {
        name: mapping.shape for mapping in family.list_mappings(family.as_stored(spec)) for name in mapping.theirs
    }
    held = {
        name: shape
        for name, shape in found.shapes.items()
        if name in wanted or not (name.endswith(COMPUTED) or family.is_left_out(name, spec, public.config))
    }
    if spec.tied:  # some files repeat the embedding as the head, and some families' own files always do
        for shapes in (wanted, held):
            shapes.pop("lm_head.weight", None)
    for name in sorted(wanted.keys() | held.keys()):
        if wanted.get(name) != held.get(name):
            first = Message(
                "plan.first_difference",
                " The first difference is {name}: {held} in the files, {wanted} by config.json.",
                name=name,
                held=_describe(held.get(name)),
                wanted=_describe(wanted.get(name)),
            )
            raise _other(folder, *(sum(map(math.prod, shapes.values())) for shapes in (held, wanted)), first)


def _describe(shape: tuple[int, ...] | None) -> str:
    return Message("plan.no_tensor_here", "no such tensor") if shape is None else str(list(shape))


def _other(folder: Path, held: int, described: int, first: str) -> RecipeError:
    return RecipeError(
        "plan.other_weights",
        "{folder}: the safetensors files hold {held:,} parameters, but config.json describes {described:,}.{first}",
        folder=str(folder),
        held=held,
        described=described,
        first=first,
    )


def _unreadable(path: Path, problem: Message) -> RecipeError:
    return RecipeError("plan.unreadable_weights", "{file}: {problem}.", file=str(path), problem=problem)
