"""Fetches shards from addresses (``s3://bucket/prefix/*.jsonl.gz``, ``hf://datasets/…``, ``https://…``) with fsspec into ``fetched/`` of the
workspace. They are then ingested as local files. An interrupted fetch continues where it stopped if the file's size and etag are the same. An
ingested file is fetched again only if its size or etag changed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from factory.core.errors import InputError
from factory.core.faults import is_machine_fault_unrelated_to_files
from factory.core.progress import Progress
from factory.ingest.filing import move_ingested_file
from factory.ledger.ledger import Ledger, record_event
from factory.ledger.plant import Plant
from kernels.contract.files import rename_into_place, write_atomically
from kernels.contract.message import Message
from trainer.contract.data.token_shard import hash_file

if TYPE_CHECKING:
    from factory.ingest.chain import ShardReport

FETCHED_FOLDER = "fetched"  # the name of the folder and of the event {address, size, etag, shards}
_BLOCK = 4 << 20
_TRIES = 3
_ETAGS = ("ETag", "etag", "blob_id", "md5Hash", "LastModified", "last_modified", "mtime")


def is_address(name: str) -> bool:
    """
    >>> is_address("s3://bucket/a.jsonl"), is_address("data/a.jsonl"), is_address("C://x")
    (True, False, False)
    """
    return len(name.partition("://")[0]) > 1 and "://" in name


def fetch_files(plant: Plant, address: str) -> tuple[Path, dict[Path, str], int]:
    """Fetch the files at an address. Returns (the local folder, the address of each local file, the number of files that were ingested before).

    Raises: InputError for an address that cannot be read. A repeated call continues where this call stopped.
    """
    system, root = _system(address)
    folder = plant.workspace.root / FETCHED_FOLDER / hashlib.sha256(address.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[Path, str] = {}
    known = 0
    done = _ingested(plant.ledger)
    paths = _listed(system, root, address)
    for number, path in enumerate(paths):
        whole = str(system.unstrip_protocol(path))
        about = _about(system, path, whole)
        if done.get(whole) == [about["size"], about["etag"]]:
            known += 1
            continue
        target = folder / _inside(path, paths)
        target.parent.mkdir(parents=True, exist_ok=True)
        title = f"fetch {target.name}" + (f" ({number + 1} of {len(paths)})" if len(paths) > 1 else "")
        _fetch(system, path, about, target, plant.progress, title)
        found[target] = whole
    return folder, found, known


def record_fetched_file(plant: Plant, path: Path, address: str, reports: Sequence[ShardReport]) -> None:
    """Record that a fetched file was ingested, and move it to its place as a shard. A file that was cut into shards is deleted, because
    the address still has it."""
    sha256 = hash_file(path)
    about = json.loads(_note(path).read_text())
    detail = {"address": address, **about, "shards": [one.sha256 for one in reports]}
    own = next((one for one in reports if one.sha256 == sha256), None)
    if own:
        move_ingested_file(plant, path, sha256, own.state)
    else:
        path.unlink()
    with plant.ledger.begin() as tx:
        record_event(tx, FETCHED_FOLDER, f"address:{hashlib.sha256(address.encode()).hexdigest()[:16]}", detail)
    _note(path).unlink()
    for left in (path.parent, *path.parent.parents):
        if left == plant.workspace.root / FETCHED_FOLDER or any(left.iterdir()):
            break
        left.rmdir()


def _ingested(ledger: Ledger) -> dict[str, list[Any]]:
    rows = ledger.read("SELECT detail FROM events WHERE kind = :kind ORDER BY id", kind=FETCHED_FOLDER)
    return {row["detail"]["address"]: [row["detail"]["size"], row["detail"]["etag"]] for row in rows}


def _system(address: str) -> tuple[Any, str]:
    import fsspec

    scheme = address.partition("://")[0]
    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(address)
        return found
    except ImportError as error:
        raise InputError(
            "ingest.remote_not_installed",
            "{address} cannot be fetched, because a package for {scheme}:// is not installed. Run 'pip install \"llm-factory[remote]\"'",
            address=address,
            scheme=scheme,
        ) from error
    except ValueError as error:
        raise InputError(
            "ingest.address", "the address {address} cannot be used: {error}", address=address, error=error
        ) from error


def _listed(system: Any, root: str, address: str) -> list[str]:
    """Return the paths of all files at an address, sorted by name."""
    try:
        if any(sign in root for sign in "*?["):
            found = [path for path in system.glob(root) if not system.isdir(path)]
        else:
            found = system.find(root) if system.isdir(root) else [root]
    except Exception as error:  # from any library that fsspec uses  # noqa: BLE001
        raise _unread(address, error) from error
    found = sorted(path for path in found if not PurePosixPath(path).name.startswith("."))
    if not found:
        raise InputError("ingest.no_remote_file", "there is no file at the address {address}", address=address)
    return found


def _inside(path: str, paths: Sequence[str]) -> str:
    """Return the path of a file relative to the folder that all ``paths`` share. File names are kept, because they tell how to read a file."""
    parents = [PurePosixPath(unquote(urlsplit(one).path) if "://" in one else one) for one in paths]
    mine = parents[list(paths).index(path)]
    common = parents[0].parent
    while any(not one.is_relative_to(common) for one in parents):
        common = common.parent
    return str(mine.relative_to(common)).replace("..", "__")


def _about(system: Any, path: str, address: str) -> dict[str, Any]:
    try:
        info = system.info(path)
    except Exception as error:  # noqa: BLE001
        raise _unread(address, error) from error
    etag = next((str(info[key]) for key in _ETAGS if info.get(key)), "")
    return {"size": info.get("size"), "etag": etag}


def _note(target: Path) -> Path:
    return target.with_name(f".{target.name}.about")


def _fetch(system: Any, path: str, about: dict[str, Any], target: Path, progress: Progress, title: str) -> None:
    part, note = target.with_name(f".{target.name}.part"), _note(target)
    if not note.exists() or json.loads(note.read_text()) != about:
        part.unlink(missing_ok=True)
        target.unlink(missing_ok=True)
        write_atomically(note, json.dumps(about))
    if target.exists():
        return
    with progress.task(title, total=about["size"]) as task:
        for attempt in range(_TRIES):
            try:
                _append(system, path, about, part, task)
                break
            except Exception as error:  # from any library that fsspec uses  # noqa: BLE001
                if isinstance(error, OSError) and (is_machine_fault_unrelated_to_files(error) or error.filename):
                    raise  # this is a fault of this machine's own disk
                if attempt == _TRIES - 1:
                    there = part.stat().st_size if part.exists() else 0
                    raise InputError(
                        "ingest.fetch_stopped",
                        "the fetch of {path} failed ({kind}: {error}). To continue at byte {at:,}, run the same command again",
                        path=path,
                        kind=type(error).__name__,
                        error=str(error)[:200],
                        at=there,
                    ) from error
                time.sleep(attempt)
    if _about(system, path, path) != about:
        part.unlink()
        raise InputError(
            "ingest.changed_in_fetch",
            "{path} changed during the fetch. Fetch the file again when it is complete",
            path=path,
        )
    rename_into_place(part, target)


def _append(system: Any, path: str, about: dict[str, Any], part: Path, task: Any) -> None:
    """Fetch the rest of a file into ``part``. Raises: EOFError if the file ends before its size."""
    with open(part, "ab") as out:
        there = out.tell()
        task.advance(there)
        if about["size"] is None:  # the server does not know the size: fetch everything in one request
            out.truncate(0)
            with system.open(path, "rb") as source:
                shutil.copyfileobj(source, out, _BLOCK)
            return
        while there < about["size"]:
            block = system.cat_file(path, start=there, end=min(there + _BLOCK, about["size"]))
            if not block:
                ends = Message(
                    "ingest.remote_cut_off",
                    "the file ends too early, at byte {at:,} of {size:,}",
                    at=there,
                    size=about["size"],
                )
                raise EOFError(ends)
            out.write(block)
            out.flush()
            there += len(block)
            task.advance(len(block))


def _unread(address: str, error: Exception) -> InputError:
    if isinstance(error, FileNotFoundError):
        return InputError("ingest.no_address", "the address {address} does not exist", address=address)
    words = str(error).strip().splitlines()
    return InputError(
        "ingest.unreadable_address",
        "{address} cannot be read ({kind}: {error})",
        address=address,
        kind=type(error).__name__,
        error=words[0][:200] if words else "",
    )
