"""Folders of models that are damaged, hostile or of another kind: each is refused with a code, the file and the tensor or key."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.adapters import convert_to_files, list_stored_tensors
from models.adapters.config_reader import ModelFilesError
from models.files.model_folder import INDEX, ONE_FILE, open_model_folder
from models.files.safetensors_file import read_header, write_weights
from tests.support.models.changed_files import write_lfs_pointer
from tests.support.models.multi_token import PublishedLayers
from tests.support.models.small_models import CASES, Case, save_model

LLAMA = next(case for case in CASES if str(case) == "llama-scaled")
TIED = next(case for case in CASES if str(case) == "llama-tied")
GLM = next(case for case in CASES if str(case) == "glm4_moe-plain")
MULTI_TOKEN = next(case for case in CASES if str(case) == "glm4_moe-multi-token")
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders as transformers writes them, in one file and in shards."""
    root = tmp_path_factory.mktemp("made")
    return {
        "one": save_model(LLAMA.make_model(), root / "one"),
        "shards": save_model(LLAMA.make_model(), root / "shards", 40_000),
        "tied": save_model(TIED.make_model(), root / "tied"),
        "experts": save_model(GLM.make_model(), root / "experts"),
        "multi-token": save_multi_token(MULTI_TOKEN, root / "multi-token"),
    }


def save_multi_token(case: Case, folder: Path) -> Path:
    model = case.make_model()
    PublishedLayers(model, case.multi_token_layers).save(model, save_model(model, folder))
    return folder


@pytest.fixture
def folder(made: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        shutil.copytree(made[name], tmp_path / name)
        return tmp_path / name

    return copy


def read_all(folder: Path) -> dict[str, Tensor]:
    return dict(open_model_folder(folder).iterate_native())


def refusal(folder: Path) -> ModelFilesError:
    with pytest.raises(ModelFilesError) as raised:
        read_all(folder)
    return raised.value


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Replace, add or (None) remove tensors of a folder with one file."""
    held = load_file(folder / ONE_FILE)
    for name, tensor in tensors.items():
        held.pop(name, None)
        if tensor is not None:
            held[name] = tensor
    save_file(held, folder / ONE_FILE, {"format": "pt"})


def write_raw(file: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def edit_json(file: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


# -- what is read ------------------------------------------------------------------------------------------------------
def test_one_file_and_shards_give_the_same_tensors(made: dict[str, Path]) -> None:
    one, shards = read_all(made["one"]), read_all(made["shards"])
    assert len(list(made["shards"].glob("*.safetensors"))) > 3
    assert list(one) == list(shards) and all(torch.equal(one[name], shards[name]) for name in one)
    assert {tensor.dtype for tensor in one.values()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "case", [TIED, GLM, next(case for case in CASES if str(case) == "gemma3_text-scaled")], ids=str
)
def test_an_export_with_the_recorded_dtypes_is_the_source_to_the_bit(
    tmp_path: Path, case: Case, dtype: torch.dtype
) -> None:
    """Also norms with 1 + weight and permuted rows, and a bias that stays in fp32 beside bf16."""
    source = open_model_folder(save_model(case.make_model().to(dtype), tmp_path / "source", 50_000))
    native = dict(source.iterate_native())
    (tmp_path / "out").mkdir()
    layout = list_stored_tensors(source.spec, source.family, lambda name: getattr(torch, source.dtypes[name]))
    names = write_weights(
        tmp_path / "out", layout, convert_to_files(source.spec, source.family, native.__getitem__), 50_000
    )
    before = {
        key: tensor for file in (tmp_path / "source").glob("*.safetensors") for key, tensor in load_file(file).items()
    }
    after = {key: tensor for name in names for key, tensor in load_file(tmp_path / "out" / name).items()}
    assert set(after) == set(before) and len(names) > 1
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype and torch.equal(after[key], tensor), key
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert set(index["weight_map"]) == set(before) and all(
        (tmp_path / "out" / name).stat().st_size < 60_000 for name in names
    )


def test_layers_for_multi_token_prediction_are_read_if_the_files_have_them(folder: Callable[[str], Path]) -> None:
    path = folder("multi-token")
    source, last = open_model_folder(path), MULTI_TOKEN.make_config().num_hidden_layers
    assert source.spec.multi_token_layers == 1 and source.left_out == ()
    native, stored = dict(source.iterate_native()), load_file(path / ONE_FILE)
    assert torch.equal(native["multi_token.0.join"], stored[f"model.layers.{last}.eh_proj.weight"])
    own = {name: tensor for name, tensor in stored.items() if not name.startswith(f"model.layers.{last}.")}
    save_file(own, path / ONE_FILE, {"format": "pt"})
    assert open_model_folder(path).spec == source.spec.without_multi_token, "as transformers writes the model"
    assert read_all(path).keys() == {name for name in native if not name.startswith("multi_token.")}
    save_file(own | {f"model.layers.{last}.enorm.weight": torch.ones(32)}, path / ONE_FILE, {"format": "pt"})
    assert refusal(path).code == "models.missing_tensor"
    save_file(stored | {f"model.layers.{last + 1}.enorm.weight": torch.ones(32)}, path / ONE_FILE, {"format": "pt"})
    assert refusal(path).data["tensor"] == f"model.layers.{last + 1}.enorm.weight"
    save_file(stored, path / ONE_FILE, {"format": "pt"})
    edit_json(path / "config.json", lambda config: config.update(num_nextn_predict_layers=0))
    assert refusal(path).code == "models.extra_tensor", "config.json says that there are none"


@pytest.mark.parametrize(
    ("copy", "whole"), [("embed_tokens.weight", EMBEDDING), ("shared_head.head.weight", "lm_head.weight")]
)
def test_a_copy_in_a_layer_for_multi_token_prediction_may_be_missing_but_not_differ(
    folder: Callable[[str], Path], copy: str, whole: str
) -> None:
    path = folder("multi-token")
    name = f"model.layers.{MULTI_TOKEN.make_config().num_hidden_layers}.{copy}"
    stored = load_file(path / ONE_FILE)
    assert torch.equal(stored[name], stored[whole]) and name in open_model_folder(path).dtypes
    without = {key: tensor for key, tensor in stored.items() if key != name}
    save_file(without, path / ONE_FILE, {"format": "pt"})
    assert open_model_folder(path).left_out == ()
    stored[name][3, 4] += 1
    save_file(stored, path / ONE_FILE, {"format": "pt"})
    error = refusal(path)
    assert error.code == "models.other_copy" and error.data["count"] == 1
    assert (error.data["copy"], error.data["whole"]) == (name, whole)


def test_a_head_of_a_tied_model_must_equal_the_embedding(folder: Callable[[str], Path]) -> None:
    path = folder("tied")
    head = load_file(path / ONE_FILE)[EMBEDDING].clone()
    change(path, **{"lm_head.weight": head})
    assert open_model_folder(path).left_out == ("lm_head.weight",)
    head[3, 4] += 1
    change(path, **{"lm_head.weight": head})
    error = refusal(path)
    assert error.code == "models.other_head" and error.data["count"] == 1


# -- what is refused ---------------------------------------------------------------------------------------------------
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "missing").code == "models.no_folder"
    assert refusal(tmp_path).code == "models.no_config"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    (tmp_path / "a.GGUF").write_bytes(b"GGUF")
    error = refusal(tmp_path)
    assert error.code == "models.only_gguf" and (error.data["count"], error.data["file"]) == (2, tmp_path / "a.GGUF")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert refusal(tmp_path).code == "models.adapter_only"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickled_weights_are_refused(folder: Callable[[str], Path], name: str) -> None:
    path = folder("one")
    (path / ONE_FILE).unlink()
    assert refusal(path).code == "models.no_weights"
    (path / name).write_bytes(b"\x80\x02")
    error = refusal(path)
    assert error.code == "models.pickled" and error.data["file"] == name


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("[]", "models.not_a_mapping"),
        ("{", "models.not_json"),
        ('{"a": 1, "a": 2}', "models.not_json"),
        ("[" * 100_000, "models.not_json"),
        ("{}" + " " * (1 << 20), "models.huge_json"),
    ],
    ids=["list", "cut", "twice", "deep", "huge"],
)  # fmt: skip
def test_a_config_that_is_no_mapping_is_refused(folder: Callable[[str], Path], content: str, code: str) -> None:
    path = folder("one")
    (path / "config.json").write_text(content)
    error = refusal(path)
    assert error.code == code and error.data["file"] == path / "config.json"


def test_a_shard_that_is_not_there_is_refused(folder: Callable[[str], Path]) -> None:
    path = folder("shards")
    gone = sorted(path.glob("*.safetensors"))[1]
    gone.unlink()
    error = refusal(path)
    assert error.code == "models.missing_shard" and error.data["file"] == gone.name


def test_an_index_that_names_a_file_that_is_not_there_is_refused_by_the_files_name(
    folder: Callable[[str], Path],
) -> None:
    """Also if the tensor is in another file, which is read before."""
    path = folder("shards")
    edit_json(path / INDEX, lambda index: index["weight_map"].update({EMBEDDING: "nothere.safetensors"}))
    error = refusal(path)
    assert error.code == "models.missing_shard" and error.data["file"] == "nothere.safetensors"


def test_shards_without_their_index_are_refused_with_its_name(folder: Callable[[str], Path]) -> None:
    path = folder("shards")
    (path / INDEX).unlink()
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    error = refusal(path)
    assert error.code == "models.no_index"
    assert (error.data["count"], error.data["file"], error.data["index"]) == (len(shards), shards[0], INDEX)


@pytest.mark.parametrize(("name", "form"), [(ONE_FILE, "one"), (INDEX, "shards"), ("config.json", "one")])
def test_a_pointer_of_git_lfs_is_refused_as_such(folder: Callable[[str], Path], name: str, form: str) -> None:
    path = folder(form)
    write_lfs_pointer(path / name)
    error = refusal(path)
    assert error.code == "models.lfs_pointer" and error.data == {"file": path / name, "folder": path}


@pytest.mark.parametrize("keep", [4, 100, 0.5, 0.999], ids=str)
def test_a_truncated_shard_is_refused(folder: Callable[[str], Path], keep: float) -> None:
    path = folder("shards")
    file = sorted(path.glob("*.safetensors"))[1]
    size = file.stat().st_size
    os.truncate(file, int(keep if keep > 1 else size * keep))
    error = refusal(path)
    assert (
        error.code == ("models.truncated_header" if keep > 1 else "models.other_length") and error.data["file"] == file
    )


def test_a_file_that_is_cut_while_it_is_read_is_refused(folder: Callable[[str], Path]) -> None:
    path = folder("one")
    source = open_model_folder(path)
    os.truncate(path / ONE_FILE, (path / ONE_FILE).stat().st_size // 2)
    with pytest.raises(ModelFilesError) as raised:
        dict(source.iterate_native())
    assert raised.value.code == "models.cut_short"


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "", "a/b.safetensors"])
def test_an_index_that_names_a_file_elsewhere_is_refused(folder: Callable[[str], Path], name: str) -> None:
    path = folder("shards")
    edit_json(path / INDEX, lambda index: index["weight_map"].update({EMBEDDING: name}))
    error = refusal(path)
    assert error.code == "models.other_folder" and error.data["name"] == name


def test_a_link_out_of_the_folder_is_refused_but_not_one_within_a_cache(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    path = folder("one")
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / "0123"
    (cache / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in path.iterdir():
        shutil.copy(file, cache / "blobs" / f"{file.name}-blob")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{file.name}-blob")
    assert len(read_all(snapshot)) > 30
    for name in (ONE_FILE, "config.json"):
        (tmp_path / "outside").mkdir()
        (path / name).rename(tmp_path / "outside" / name)
        (path / name).symlink_to(tmp_path / "outside" / name)
        error = refusal(path)
        assert error.code == "models.link_outside" and error.data["file"] == path / name
        (path / name).unlink()
        (tmp_path / "outside" / name).rename(path / name)
        (tmp_path / "outside").rmdir()


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (lambda index: index["weight_map"].update(other="model-00001-of-00001.safetensors"), "models.missing_shard"),
        (lambda index: index.update(weight_map=[]), "models.weight_map"),
        (lambda index: index.update(weight_map={}), "models.weight_map"),
        (lambda index: index["weight_map"].update({EMBEDDING: 3}), "models.weight_map"),
        (lambda index: index["weight_map"].pop(EMBEDDING), "models.other_shard"),
        (lambda index: index["weight_map"].update(more=next(iter(index["weight_map"].values()))), "models.not_in_shard"),
    ],
    ids=["missing-file", "list", "empty", "number", "unlisted", "unheld"],
)  # fmt: skip
def test_an_index_that_does_not_fit_its_shards_is_refused(folder: Callable[[str], Path], edit: Any, code: str) -> None:
    path = folder("shards")
    edit_json(path / INDEX, edit)
    assert refusal(path).code == code


def test_a_tensor_in_two_shards_is_refused(folder: Callable[[str], Path]) -> None:
    path = folder("shards")
    first, second, *_ = sorted(path.glob("*.safetensors"))
    double = next(iter(load_file(first)))
    save_file(load_file(second) | {double: load_file(first)[double]}, second)
    error = refusal(path)
    assert error.code == "models.double_tensor" and error.data["tensor"] == double


def test_two_sets_of_weights_are_refused(folder: Callable[[str], Path], made: dict[str, Path]) -> None:
    path = folder("shards")
    shutil.copy(made["one"] / ONE_FILE, path)
    assert refusal(path).code == "models.two_sets"


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED: list[tuple[str, dict[str, Any] | bytes, int, str]] = [
    ("overlap", {"a": ENTRY, "b": ENTRY | {"data_offsets": [4, 12]}}, 12, "models.overlapping"),
    ("gap", {"a": ENTRY, "b": ENTRY | {"data_offsets": [12, 20]}}, 20, "models.overlapping"),
    ("same-place", {"a": ENTRY, "b": ENTRY}, 8, "models.overlapping"),
    ("more-bytes", {"a": ENTRY}, 12, "models.other_length"),
    ("other-size", {"a": ENTRY | {"shape": [3]}}, 8, "models.damaged_header"),
    ("negative", {"a": ENTRY | {"shape": [-2]}}, 8, "models.damaged_header"),
    ("huge-shape", {"a": ENTRY | {"shape": [1 << 60]}}, 8, "models.damaged_header"),
    ("no-offsets", {"a": {"dtype": "F32", "shape": [2]}}, 8, "models.damaged_header"),
    ("shape-of-text", {"a": ENTRY | {"shape": ["2"]}}, 8, "models.damaged_header"),
    ("list", b"[1, 2]", 8, "models.damaged_header"),
    ("no-json", b"{{{{", 8, "models.damaged_header"),
    ("deep", b'{"a":' + b"[" * 100_000, 8, "models.damaged_header"),
    ("twice", b'{"a": %b, "a": %b}' % (json.dumps(ENTRY).encode(), json.dumps(ENTRY).encode()), 8, "models.damaged_header"),
    ("not-utf-8", b"\xff\xfe\x00", 8, "models.damaged_header"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "header", "size", "code"), DAMAGED, ids=[row[0] for row in DAMAGED])
def test_a_damaged_header_is_refused(tmp_path: Path, name: str, header: Any, size: int, code: str) -> None:
    write_raw(tmp_path / "a.safetensors", header, bytes(size))
    with pytest.raises(ModelFilesError) as raised:
        read_header(tmp_path / "a.safetensors")
    assert raised.value.code == code and raised.value.data["file"] == tmp_path / "a.safetensors"


def test_a_huge_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    with open(file, "wb") as opened:
        opened.write(struct.pack("<Q", 1 << 33))
        opened.truncate(1 << 34)
    with pytest.raises(ModelFilesError) as raised:
        read_header(file)
    assert raised.value.code == "models.huge_header"


def test_missing_extra_and_reshaped_tensors_are_counted_and_the_first_is_named(folder: Callable[[str], Path]) -> None:
    path = folder("one")
    held = load_file(path / ONE_FILE)
    norms = [name for name in held if name.endswith("input_layernorm.weight")]
    change(path, **dict.fromkeys(norms))
    error = refusal(path)
    assert (error.code, error.data["count"], error.data["tensor"]) == ("models.missing_tensor", 4, norms[0])
    change(path, **{name: held[name] for name in norms} | {"model.layers.0.more": torch.zeros(1)})
    error = refusal(path)
    assert (error.code, error.data["count"], error.data["tensor"]) == ("models.extra_tensor", 1, "model.layers.0.more")
    change(path, **{"model.layers.0.more": None, EMBEDDING: held[EMBEDDING][:-1].clone()})
    error = refusal(path)
    assert (error.code, error.data["tensor"]) == ("models.other_shape", EMBEDDING)
    assert error.data["found"] == "[95, 32]" and error.data["expected"] == "[96, 32]"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float64, torch.int64])
def test_a_dtype_that_fp32_does_not_hold_is_refused(folder: Callable[[str], Path], dtype: torch.dtype) -> None:
    path = folder("one")
    change(path, **{EMBEDDING: load_file(path / ONE_FILE)[EMBEDDING].to(dtype)})
    error = refusal(path)
    assert error.code == "models.stored_dtype" and error.data["tensor"] == EMBEDDING


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_numbers_are_counted(folder: Callable[[str], Path], value: float) -> None:
    path = folder("one")
    damaged = load_file(path / ONE_FILE)[EMBEDDING].clone()
    damaged[1, :3] = value
    change(path, **{EMBEDDING: damaged})
    error = refusal(path)
    assert (error.code, error.data["tensor"], error.data["count"]) == ("models.not_finite", EMBEDDING, 3)
