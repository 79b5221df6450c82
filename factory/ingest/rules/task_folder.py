"""Lists the files of ``policies/tasks/`` with items of tasks, and the files that may have items but cannot be read.

This is a file of its own so that ``factory status`` can import it without numpy.
"""

from __future__ import annotations

import re
from pathlib import Path

PLAIN = (".jsonl", ".json", ".csv", ".parquet")
SUFFIXES = (*PLAIN, *(f"{suffix}.gz" for suffix in PLAIN if suffix != ".parquet"))
BESIDE = (".yaml", ".py", ".pyc", ".md")  # suffixes of files in that folder that have no items


def get_data_suffix(path: Path) -> str:
    """Return the suffix of a data file, including ``.gz``, or '' if the file is not a data file.

    >>> get_data_suffix(Path("HumanEval.jsonl.gz")), get_data_suffix(Path("arc.csv")), get_data_suffix(Path("MATH.tar"))
    ('.jsonl.gz', '.csv', '')
    """
    return max((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), key=len, default="")


def list_item_files(folder: Path) -> list[Path]:
    """Return the data files of a folder and of the folders below it, sorted. A folder of ``0.json``, ``1.json`` … with one record each, as in MATH,
    counts as one data file."""
    numbered = {path for path in {file.parent for file in _files(folder)} - {folder} if is_numbered_folder(path)}
    return sorted(numbered | {path for path in _files(folder) if get_data_suffix(path) and path.parent not in numbered})


def is_numbered_folder(path: Path) -> bool:
    """Return whether the path is a folder of numbered JSON files and nothing else."""
    return path.is_dir() and all(re.fullmatch(r"\d+\.json", one.name) for one in path.iterdir())


def list_unreadable_files(folder: Path) -> list[Path]:
    """Return the files of a folder and of the folders below it that may have items, but are of kinds that cannot be read. Ingest cannot keep the
    items of these files out of training data."""
    return [
        path
        for path in _files(folder)
        if not get_data_suffix(path)
        and path.suffix not in BESIDE
        and not path.name.startswith(("_", ".", "README", "LICENSE"))
    ]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
