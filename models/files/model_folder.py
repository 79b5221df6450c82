"""A public model's folder: its config.json and its weights in safetensors files, checked before a weight is read, then read one at a time.

    source = open_model_folder(Path("SmolLM2-135M"))
    for name, tensor in source.iterate_native():   # fp32, by the names of ``models.tensors``
        ...
    source.left_out                                # tensors of the files that hold nothing of the model

The files are untrusted. Nothing in a folder is run, and no path in it is followed out of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.adapters import convert_to_native, find_family_for_config
from models.adapters.config_reader import ModelFilesError
from models.adapters.family import Family
from models.files.safetensors_file import (
    TORCH_NAMES,
    WEIGHTS,
    StoredTensor,
    read_header,
    read_tensor,
    refuse_double_keys,
    refuse_lfs_pointer,
)
from models.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

MOST_CONFIG_BYTES = 1 << 20
MOST_INDEX_BYTES = 1 << 26
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class ModelSource:
    """A model to import: a description, and its tensors by the names of the family's files. A folder is opened by ``open_model_folder``; another
    source, such as a reader of GGUF files, gives a ``read`` of its own and uses ``check_shapes``."""

    where: Path
    config: Mapping[str, Any]
    family: Family
    spec: ModelSpec
    dtypes: Mapping[
        str, str
    ]  # of each tensor of the files, by torch's name: an export with these is the source to the bit
    left_out: tuple[str, ...]
    read: Callable[[str], Tensor]  # a tensor of the files in fp32

    def iterate_native(self) -> Iterator[tuple[str, Tensor]]:
        """Each native tensor by name, fp32. Memory holds one at a time. Raises: ModelFilesError that names the file and the tensor; OSError."""
        return convert_to_native(self.spec, self.family, self.read)


def open_model_folder(folder: Path, context: int | None = None) -> ModelSource:
    """Read the config.json and the headers of the weights, and check that they fit.

    ``context``: positions in a row; None: as many as the file allows.

    Raises: ModelFilesError that names the file and the key or tensor, and says what to do; OSError.
    """
    config = read_model_config(folder)
    family = find_family_for_config(config, folder / "config.json")
    described = family.read_config(config, folder / "config.json", context)
    tensors = read_tensor_headers(folder)
    spec = family.fit_to_tensors(described, tensors)
    for name, one in tensors.items():
        if one.dtype not in WEIGHTS:
            raise ModelFilesError(
                "models.stored_dtype",
                "{file}: tensor {tensor} has dtype {dtype}. Use a copy of the model whose weights are {allowed}",
                file=one.file,
                tensor=name[:120],
                dtype=one.dtype,
                allowed=list(WEIGHTS),
            )
    left_out = check_shapes(spec, family, {name: one.shape for name, one in tensors.items()}, folder)
    used = {name: one for name, one in tensors.items() if name not in left_out}
    if spec.tied and "lm_head.weight" in left_out:
        _require_equal_head(tensors)
    _require_equal_copies(spec, family, tensors)
    return ModelSource(
        folder,
        config,
        family,
        spec,
        {name: TORCH_NAMES[one.dtype] for name, one in used.items()},
        tuple(left_out),
        lambda name: read_tensor(name, tensors[name]),
    )


def read_model_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json. Raises: ModelFilesError that says what the folder has instead of a model; OSError."""
    if not folder.is_dir():
        raise ModelFilesError(
            "models.no_folder",
            "{folder} is not a folder. Give the folder of a model, with its config.json, or a file whose name ends with .gguf",
            folder=folder,
        )
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ModelFilesError(
                "models.adapter_only",
                "{folder} has only a LoRA adapter. Merge it into its base model first, with merge_and_unload() and save_pretrained() of "
                "peft",
                folder=folder,
            )
        if files := sorted(path for path in folder.iterdir() if path.suffix.lower() == ".gguf"):
            raise ModelFilesError(
                "models.only_gguf",
                "{folder} has no config.json, but {count:,|.gguf file|.gguf files}. To use such a model, name the file: {file}",
                folder=folder,
                count=len(files),
                file=files[0],
            )
        raise ModelFilesError(
            "models.no_config",
            "{folder} has no config.json, so it is not the folder of a model. Give the folder that has the model's config.json and weights",
            folder=folder,
        )
    return _read_json(find_inside(folder, "config.json"), MOST_CONFIG_BYTES)


def _read_json(file: Path, most_bytes: int) -> dict[str, Any]:
    refuse_lfs_pointer(file)
    size = file.stat().st_size
    if size > most_bytes:
        raise ModelFilesError(
            "models.huge_json",
            "{file} has {bytes:,} bytes. At most {most:,} are read. Copy or download the file again",
            file=file,
            bytes=size,
            most=most_bytes,
        )
    try:
        found = json.loads(file.read_bytes(), object_pairs_hook=refuse_double_keys)
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(
            "models.not_json",
            "{file} is not JSON: {problem}. Copy or download the file again",
            file=file,
            problem=str(error)[:200],
        ) from None
    if not isinstance(found, dict):
        raise ModelFilesError(
            "models.not_a_mapping",
            "{file} must be a mapping of keys to values. Copy or download the file again",
            file=file,
        )
    return found


def find_inside(folder: Path, name: str) -> Path:
    """The file of a folder. A link out of the folder is refused, except to the blobs of the same cache of Hugging Face's hub."""
    odd = not name.isprintable() or len(name.encode("utf-8", "surrogatepass")) > 255
    if odd or "/" in name or "\\" in name or name in ("", ".", ".."):
        raise ModelFilesError(
            "models.other_folder",
            "{folder}: the index names {name}, which is not a file of this folder",
            folder=folder,
            name=ascii(name[:120]) if odd else name[:120],
        )
    target = (folder / name).resolve()
    home = folder.resolve()
    allowed = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if target.parent not in allowed and target.exists():
        raise ModelFilesError(
            "models.link_outside",
            "{file} is a link to {target}, outside the folder. Copy the file into the folder",
            file=folder / name,
            target=target,
        )
    return folder / name


def read_tensor_headers(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the folder's files."""
    has_one, has_index = (folder / ONE_FILE).is_file(), (folder / INDEX).is_file()
    if has_one and has_index:
        raise ModelFilesError(
            "models.two_sets",
            "{folder} has both {one} and {index}. Remove the one that is not the model",
            folder=folder,
            one=ONE_FILE,
            index=INDEX,
        )
    if has_one:
        return read_header(find_inside(folder, ONE_FILE))
    if has_index:
        return _read_shards(folder)
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        raise ModelFilesError(
            "models.pickled",
            "{folder} has its weights only as pickle ({file}), and reading a pickle can run code. Convert the model where you trust it: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OUT)",
            folder=folder,
            file=pickled[0],
        )
    if shards := sorted(folder.glob("*.safetensors")):
        raise ModelFilesError(
            "models.no_index",
            "{folder} has {count:,|file|files} of weights ({file} …), but no {index}, which says which tensor is in which file. Copy or download "
            "{index} too. If one file has all weights, name it {one}",
            folder=folder,
            count=len(shards),
            file=shards[0].name,
            one=ONE_FILE,
            index=INDEX,
        )
    raise ModelFilesError(
        "models.no_weights",
        "{folder} has no weights: neither {one} nor {index}. Copy or download the weights too",
        folder=folder,
        one=ONE_FILE,
        index=INDEX,
    )


def _read_shards(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX
    weight_map = _read_json(find_inside(folder, INDEX), MOST_INDEX_BYTES).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise ModelFilesError(
            "models.weight_map",
            "{file}: weight_map must name the file of each tensor. Copy or download the file again",
            file=index,
        )
    found: dict[str, StoredTensor] = {}
    names = sorted(set(weight_map.values()))
    # All of them first: a wrong name also makes the tensors of the other files appear to be in the wrong place.
    for name in names:
        if not find_inside(folder, name).is_file():
            raise ModelFilesError(
                "models.missing_shard",
                "{index} names {file}, which is not in the folder. Download or copy all {count} files of the model",
                index=index,
                file=name,
                count=len(names),
            )
    for name in names:
        file = find_inside(folder, name)
        for key, tensor in read_header(file).items():
            if key in found:
                raise ModelFilesError(
                    "models.double_tensor",
                    "{file} and {other} both hold tensor {tensor}. Use weights and index of one model",
                    file=found[key].file,
                    other=file,
                    tensor=key,
                )
            if weight_map.get(key) != name:
                raise ModelFilesError(
                    "models.other_shard",
                    "{file} holds tensor {tensor}, which the index says is in {other}. Use weights and index of one model",
                    file=file,
                    tensor=key[:120],
                    other=str(weight_map.get(key)),
                )
            found[key] = tensor
    for key, name in weight_map.items():
        if key not in found:
            raise ModelFilesError(
                "models.not_in_shard",
                "{index}: tensor {tensor} is not in {file}. Use weights and index of one model",
                index=index,
                tensor=key[:120],
                file=name,
            )
    return found


def check_shapes(spec: ModelSpec, family: Family, shapes: Mapping[str, tuple[int, ...]], where: Path) -> list[str]:
    """The names of tensors that are not imported: buffers that follow from the config, a tied model's own head, tensors without elements.

    Raises: ModelFilesError that names the first tensor that is missing, unknown or of another shape, and how many are.
    """
    mappings = family.list_mappings(spec)
    wanted = {name: one.shape for one in mappings for name in one.theirs if not one.is_copy or name in shapes}
    missing = [name for name in wanted if name not in shapes]
    if missing:
        raise ModelFilesError(
            "models.missing_tensor",
            "{where}: {count:,|tensor|tensors} that config.json describes are missing: {tensor} … "
            "Use config.json and weights of one model",
            where=where,
            count=len(missing),
            tensor=missing[0],
        )
    other = [name for name, shape in wanted.items() if shapes[name] != shape]
    if other:
        raise ModelFilesError(
            "models.other_shape",
            "{where}: {count:,|tensor|tensors} have another shape than config.json says: {tensor} has {found}, not {expected} … "
            "Use config.json and weights of one model",
            where=where,
            count=len(other),
            tensor=other[0],
            found=str(list(shapes[other[0]])),
            expected=str(list(wanted[other[0]])),
        )
    left_out = [name for name in shapes if name not in wanted]
    unknown = [
        name
        for name in left_out
        if not (
            name.endswith(".rotary_emb.inv_freq")  # a buffer of old versions of transformers
            or 0 in shapes[name]  # transformers writes some for a model without shared experts
            or (spec.tied and name == "lm_head.weight" and shapes[name] == (spec.vocab_size, spec.d_model))
        )
    ]
    if unknown:
        raise ModelFilesError(
            "models.extra_tensor",
            "{where}: {count:,|tensor|tensors} are no part of the model that config.json describes: {tensor} … "
            "Use config.json and weights of one model",
            where=where,
            count=len(unknown),
            tensor=unknown[0][:120],
        )
    return left_out


def _require_equal_head(tensors: Mapping[str, StoredTensor]) -> None:
    head = read_tensor("lm_head.weight", tensors["lm_head.weight"])
    differing = int((head != read_tensor("model.embed_tokens.weight", tensors["model.embed_tokens.weight"])).sum())
    if differing:
        raise ModelFilesError(
            "models.other_head",
            "{file}: tie_word_embeddings is true, but {count:,|value|values} of lm_head.weight differ from the embedding. Write "
            "'tie_word_embeddings: false' into config.json if the head is the model's own",
            file=tensors["lm_head.weight"].file,
            count=differing,
        )


def _require_equal_copies(spec: ModelSpec, family: Family, tensors: Mapping[str, StoredTensor]) -> None:
    """The layers for multi-token prediction share embedding and head with the model, so a copy of their own must hold the same values."""
    mappings = family.list_mappings(spec)
    named = {one.natives[0]: one.theirs[0] for one in mappings if not one.is_copy}
    for one in mappings:
        name, whole = one.theirs[0], named[one.natives[0]]
        if not one.is_copy or name not in tensors:
            continue
        differing = int((read_tensor(name, tensors[name]) != read_tensor(whole, tensors[whole])).sum())
        if differing:
            raise ModelFilesError(
                "models.other_copy",
                "{file}: {count:,|value|values} of {copy} differ from {whole}. The layers for multi-token prediction must share embedding and head "
                "with the model. To import the model without these layers, write 'num_nextn_predict_layers: 0' into config.json and remove their "
                "tensors",
                file=tensors[name].file,
                count=differing,
                copy=name,
                whole=whole,
            )
