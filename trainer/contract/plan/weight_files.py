"""The size of a model's weights, from the headers of its safetensors files alone, compared with the description of the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from kernels.contract.message import Message
from models.adapters.config_reader import ModelFilesError
from models.files.model_folder import check_shapes, read_tensor_headers
from models.files.safetensors_file import SIZES
from models.tensors import count_values
from trainer.contract.errors import RecipeError
from trainer.contract.plan.hf_config import PublicModel

GUESSED_WITHIN = 0.02  # share by which sizes that were read by key names may be off: norms and biases are guessed


@dataclass(frozen=True)
class WeightFiles:
    """What a folder holds. ``bytes``: of the tensors, as they are stored."""

    files: int
    tensors: int
    parameters: int
    bytes: int


def drop_absent_layers(public: PublicModel, folder: Path) -> PublicModel:
    """The model without the layers for multi-token prediction that config.json counts, but the folder's weights lack. A folder whose weights cannot
    be read changes nothing: ``compare_weights`` says why."""
    try:
        return _fit_to_tensors(public, read_tensor_headers(folder))
    except ModelFilesError:
        return public


def _fit_to_tensors(public: PublicModel, names: Iterable[str]) -> PublicModel:
    family = public.family
    return public if family is None else replace(public, spec=family.fit_to_tensors(public.spec, names))


def compare_weights(public: PublicModel, folder: Path) -> WeightFiles | None:
    """The weights of a folder whose config.json describes ``public``; None if it has none.

    Raises: RecipeError that names a file that is missing or damaged, or both numbers of parameters and the first tensor that differs, if the files
    hold another model. Of a family that no adapter knows, the numbers alone are compared.
    """
    try:
        stored = read_tensor_headers(folder)
    except ModelFilesError as error:
        if error.code == "models.no_weights":
            return None
        raise RecipeError(error.message) from error
    public = _fit_to_tensors(public, stored)
    spec, described, differs = public.spec, public.spec.parameters, False
    first: str = Message("plan.number_alone", "the number alone was compared")
    not_counted: set[str] = set()
    if public.family is not None:
        not_counted = {name for one in public.family.list_mappings(spec) if one.is_copy for name in one.theirs}
        described = count_values(spec)
        try:
            shapes = {name: tensor.shape for name, tensor in stored.items()}
            not_counted |= {*check_shapes(spec, public.family, shapes, folder)}
        except ModelFilesError as error:
            first, differs = error.message, True
    weights = {name: tensor for name, tensor in stored.items() if name not in not_counted}
    held = sum(tensor.values for tensor in weights.values())
    if differs or abs(held / described - 1) > GUESSED_WITHIN:
        raise RecipeError(
            "plan.other_weights",
            "{folder}: the safetensors files hold {held:,} parameters, but config.json describes {described:,} ({first})",
            folder=str(folder),
            held=held,
            described=described,
            first=first,
        )
    size = sum(tensor.values * SIZES.get(tensor.dtype, 1) for tensor in weights.values())
    return WeightFiles(len({tensor.file for tensor in weights.values()}), len(weights), held, size)
