"""Where ``factory demo --from`` takes its model from: a wheel is unpacked without running it, and a machine without a network is told what to do."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from factory.core.errors import InputError
from factory.core.progress import SILENT
from factory.demo import public_model
from factory.demo.public_model import SMOLLM2, WHEEL, find_public_model


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
        find_public_model(SMOLLM2, tmp_path / "cache", SILENT)
    assert error.value.code == "public_model.not_downloaded"
    assert error.value.data["wheel"] == WHEEL and error.value.data["problem"]
    assert not (tmp_path / "cache" / WHEEL).exists()


def test_a_downloaded_wheel_with_another_hash_is_removed(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / WHEEL, "tiny.gguf")
    with pytest.raises(InputError) as error:
        find_public_model(SMOLLM2, tmp_path, SILENT)
    assert error.value.code == "public_model.other_wheel" and error.value.data["expected"] == public_model.SHA256
    assert not wheel.exists() and not (tmp_path / "tiny.gguf").exists()
