"""The families of public models that can be imported and exported: one file each, and this table.

>>> find_family_for_config({"model_type": "qwen3"}, "config.json").class_name
'Qwen3ForCausalLM'
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from models.adapters import (
    deepseek_v3,
    exaone4,
    gemma2,
    gemma3,
    glm4_moe,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    nanochat,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
)
from models.adapters.config_reader import ModelFilesError
from models.adapters.family import Family
from models.spec import ModelSpec
from models.tensors import Shape, list_tensor_shapes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# By model_type. A model that no file says otherwise of is exported as the first family that can hold it.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        module.FAMILY.name: module.FAMILY
        for module in (
            qwen3,
            llama,
            smollm3,
            glm4_moe,
            qwen2,
            mistral,
            olmo2,
            olmo3,
            gemma2,
            gemma3,
            qwen3_moe,
            deepseek_v3,
            exaone4,
            seed_oss,
            mixtral,
            olmoe,
            nanochat,
            phi3,
            gpt_oss,
        )
    }
)


def find_family_for_config(config: Mapping[str, Any], where: Path | str) -> Family:
    """The family that a config.json names. Raises: ModelFilesError that lists the families."""
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None and {"text_config", "vision_config"} & set(config):
        raise ModelFilesError(
            "models.multimodal", "{file}: a {kind} model reads images or sound too. Only models of text can be imported, such as "
                                 "google/gemma-3-1b-pt of Gemma 3 (gemma3_text)",
            file=where, kind=str(kind)[:40],
        )  # fmt: skip
    if family is None:
        raise ModelFilesError(
            "models.unknown_family", "{file}: model_type {kind} is not supported. Supported: {known}",
            file=where, kind=str(kind)[:40], known=[f"{name} ({one.class_name})" for name, one in FAMILIES.items()],
        )  # fmt: skip
    return family


def find_family_for_export(spec: ModelSpec) -> Family:
    """The family whose files hold ``spec``: that of ``spec.family``, else the first that can. Raises: ModelFilesError naming what the nearest family
    lacks."""
    asked = FAMILIES.get(spec.family) if spec.family is not None else None
    if spec.family is not None and asked is None:
        raise ModelFilesError(
            "models.no_such_family", "model.family: {family} is no family of models. Known: {known}", family=spec.family, known=sorted(FAMILIES)
        )  # fmt: skip
    nearest: tuple[Family, dict[str, tuple[Any, Any]]] | None = None
    for family in [asked] if asked else FAMILIES.values():
        found = family.find_differences(spec)
        if not found:
            return family
        if nearest is None or len(found) < len(nearest[1]):
            nearest = family, found
    assert nearest is not None
    raise ModelFilesError(
        "models.no_family", "no family of public models computes what model describes, so it could not be served. Nearest is {family}, which "
                            "cannot hold {differences}",
        family=nearest[0].class_name,
        differences=[
            f"{key} {ours} (only {theirs})" if key else str(ours) for key, (ours, theirs) in nearest[1].items()
        ],
    )  # fmt: skip


def convert_to_native(spec: ModelSpec, family: Family, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each native tensor by name, one at a time. ``read`` returns a tensor of the files by its name."""
    for mapping in family.list_mappings(spec):
        if not mapping.is_copy:
            yield from mapping.to_native(read)


def convert_to_files(spec: ModelSpec, family: Family, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the family's files by name, one native tensor at a time. ``read`` returns a native tensor by its name.

    A tensor that only the files have (``Family.as_stored``) is made: a head of its own is the embedding, and a shared expert is zeros. Copies are
    written too.
    """
    stored = family.as_stored(spec)
    held, shapes = list_tensor_shapes(spec), list_tensor_shapes(stored)

    def read_or_make(name: str) -> Tensor:
        if name in held:
            return read(name)
        embedding = read("embedding")
        return embedding if name == "head" else embedding.new_zeros(shapes[name])

    for mapping in family.list_mappings(stored):
        yield from mapping.to_theirs(read_or_make)


def list_stored_tensors(
    spec: ModelSpec, family: Family, choose_dtype: Callable[[str], torch.dtype]
) -> dict[str, tuple[torch.dtype, Shape]]:
    """The dtype and shape of each tensor that ``convert_to_files`` yields, in the same order. ``choose_dtype``: by the name in the files."""
    mappings = family.list_mappings(family.as_stored(spec))
    return {name: (choose_dtype(name), mapping.shape) for mapping in mappings for name in mapping.theirs}
