"""A task file of lm-eval, read as text before lm-eval sees it: what it includes, which data it names, and what is refused.

A file that names a task and has no ``doc_to_text`` is that task as the lm-eval package ships it, on data of the folder:

    task: arc_easy
    dataset_kwargs: {data_files: {test: ARC-Easy-Test.jsonl}}

Refused: data from anywhere but the folder, Python functions beside the file unless the policy allows them, other people's prompts and data sets,
pictures, sound. Its templates can run any code (they are Jinja's, unconfined), so lm-eval itself runs in the sandbox (``lm_eval_run``).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from factory.core.errors import nearest
from factory.ingest.rules.task_folder import SUFFIXES, item_files, suffix_of
from factory.tasks.items import TaskError

LARGEST = 1 << 20  # bytes of a YAML file
NODES = 20_000  # values in one
INCLUDED = 20  # files that one may include, one by one
READERS = ("json", "csv", "parquet")  # of the library datasets, which read local files
SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
# How these are measured; other words make such tasks new ones.
ROLLING = "with BOS before and in each whole text"
SHOTS = "examples drawn with lm-eval's seed"
KEYS = frozenset(
    {
        "task", "task_alias", "tag", "dataset_path", "dataset_name", "dataset_kwargs", "training_split", "validation_split",
        "test_split", "fewshot_split", "process_docs", "doc_to_text", "doc_to_target", "doc_to_choice", "process_results",
        "description", "target_delimiter", "fewshot_delimiter", "fewshot_config", "num_fewshot", "metric_list", "output_type",
        "generation_kwargs", "repeats", "filter_list", "should_decontaminate", "doc_to_decontamination_query", "gen_prefix",
        "metadata", "include",
    }
)  # fmt: skip
REFUSED = {
    "custom_dataset": "it loads data by its own code",
    "unsafe_code": "it runs what the model writes, outside a sandbox; write a task of kind code, or put the published file into the folder",
    "use_prompt": "it loads prompts from elsewhere",
    "doc_to_image": "these models read text",
    "doc_to_audio": "these models read text",
    "class": "it names Python code",
    "group": "it is a group of tasks; give each a file",
}


class _Loader(yaml.SafeLoader):
    """Safe, but for ``!function``, which becomes a ``Function``."""


@dataclass(frozen=True)
class Function:
    """What ``!function`` names."""

    name: str


_Loader.add_constructor("!function", lambda loader, node: Function(str(node.value)))


@dataclass(frozen=True)
class LmEvalFile:
    """What the factory needs of one. ``task`` is lm-eval's name of it."""

    task: str
    output_type: str
    shots: int
    data: tuple[Path, ...]
    cluster_by: str  # a key of its records; empty: each record by itself
    answer_key: str  # the key of its records that is the answer; empty: a template makes it
    sha256: str  # of the file, all it includes, the Python beside it where that may run, and lm-eval's version
    version: str
    shipped: str = ""  # what stands over the file, as JSON, where it is a task of the package


def read_lm_eval_file(path: Path, functions: bool) -> LmEvalFile:
    """Raises: TaskError naming the file, the key, and why it is refused."""
    read: list[Path] = []
    local = _with_included(path, path.parent.resolve(), read)
    found = list(_functions(local))
    if found and not functions:
        raise TaskError(
            f"{path}: !function {found[0].name}: it runs Python; 'functions: true' in tasks.yaml allows it, in the sandbox"
        )
    config, shipped = (local, "") if {"doc_to_text", "output_type"} & set(local) else _shipped(path, local, read)
    for key in config:
        if key in REFUSED:
            raise TaskError(f"{path}: key {key!r} is refused: {REFUSED[key]}")
        if key not in KEYS:
            raise TaskError(f"{path}: unknown key {str(key)[:80]!r}{nearest(str(key), KEYS)}")
    task = config.get("task")
    if not isinstance(task, str) or not task:
        raise TaskError(f"{path}: key 'task' must be the name of one task")
    reader = config.get("dataset_path")
    if reader not in READERS:
        raise TaskError(
            f"{path}: dataset_path {str(reader)[:80]!r} is refused: nothing is loaded from elsewhere; put the data beside the file and name it, "
            "as in 'dataset_path: json' with 'dataset_kwargs: {data_files: {test: questions.jsonl}}'"
        )
    if config.get("dataset_name") is not None:
        raise TaskError(f"{path}: dataset_name: a local file has no such part")
    for metric in config.get("metric_list") or ():
        if isinstance(metric, dict) and metric.get("hf_evaluate"):
            raise TaskError(f"{path}: metric_list: hf_evaluate loads code from elsewhere")
    data = _data(path, config.get("dataset_kwargs"))
    metadata = config.get("metadata") or {}
    cluster_by = metadata.get("cluster_by", "") if isinstance(metadata, dict) else ""
    if not isinstance(cluster_by, str):
        raise TaskError(f"{path}: metadata.cluster_by must be the name of a key of the items")
    target = config.get("doc_to_target")
    version = lm_eval_version()
    code = sorted(path.parent.glob("*.py")) if found else []
    parts = [hashlib.sha256(file.read_bytes()).hexdigest() for file in [*read, *code]]
    if config.get("output_type") == "loglikelihood_rolling":
        parts.append(ROLLING)
    if config.get("num_fewshot"):
        parts.append(SHOTS)
    shots = config.get("num_fewshot") or 0
    if not isinstance(shots, int) or isinstance(shots, bool) or not 0 <= shots <= 100:
        raise TaskError(f"{path}: num_fewshot must be a number from 0 to 100")
    return LmEvalFile(
        task,
        str(config.get("output_type", "generate_until")),
        shots,
        data,
        cluster_by,
        target if isinstance(target, str) and target.isidentifier() and not config.get("process_docs") else "",
        hashlib.sha256(json.dumps([version, *parts]).encode()).hexdigest(),
        version,
        shipped,
    )


def check_records(file: LmEvalFile, records: Sequence[Mapping[str, Any]], where: str) -> None:
    """Of one data file. lm-eval would take the name of a key that is not there for the answer itself, and count what is no answer as wrong.

    Raises: TaskError naming the record.
    """
    ids: dict[str, int] = {}
    for number, record in enumerate(records, 1):
        for key in filter(None, (file.answer_key, file.cluster_by)):
            if (value := record.get(key)) in (None, ""):
                raise TaskError(f"{where}, record {number}: key {key!r} is missing")
            if isinstance(value, float) and not math.isfinite(value):
                raise TaskError(f"{where}, record {number}: key {key!r} is {value}, which is no answer")
        if (name := record.get("id")) is not None and (first := ids.setdefault(str(name), number)) != number:
            raise TaskError(f"{where}: id {str(name)[:100]!r} appears twice, in records {first} and {number}")
        text = json.dumps(record, ensure_ascii=False, default=repr)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TaskError(f"{where}, record {number}: {text[error.start]!r} alone is no character") from None


def lm_eval_version() -> str:
    """Of the installed lm-eval. Raises: TaskError when there is none."""
    try:
        return importlib.metadata.version("lm-eval")
    except importlib.metadata.PackageNotFoundError:
        raise TaskError(
            "a task file of lm-eval needs lm-eval, which is not installed: pip install 'llm-factory[evals]'"
        ) from None


def _shipped(path: Path, local: dict[Any, Any], read: list[Path]) -> tuple[dict[Any, Any], str]:
    """(the keys of the package's task under those of the file, what stands over the file). Nothing of it is loaded from elsewhere."""
    task = local.get("task")
    if not isinstance(task, str) or not task:
        return local, ""
    lm_eval_version()
    found = importlib.util.find_spec("lm_eval")
    assert found is not None and found.origin is not None
    root = Path(found.origin).parent / "tasks"
    theirs = _task_named(root, task)
    if theirs is None:
        raise TaskError(
            f"{path}: it has no doc_to_text, and lm-eval {lm_eval_version()} ships no task {task[:100]!r}: write the whole task, or name one "
            "that it ships"
        )
    config = _with_included(theirs, root.resolve(), read) | local
    files = _data(path, local.get("dataset_kwargs"))
    named = local["dataset_kwargs"]["data_files"]
    known = set(named) if isinstance(named, dict) else {"train"}  # as the library datasets calls what has no name
    suffix = suffix_of(files[0]).removesuffix(".gz")
    over: dict[str, Any] = {
        "dataset_path": {".csv": "csv", ".parquet": "parquet"}.get(suffix, "json"),
        "dataset_name": None,
    }
    over |= {split: None for split in SPLITS if config.get(split) not in known}
    asked = config.get("test_split") or config.get("validation_split")
    if not {config.get("test_split"), config.get("validation_split")} & known:
        raise TaskError(
            f"{path}: data_files: task {task} is measured on the split {asked!r}, and the file names none of it"
        )
    fewshot = config.get("fewshot_split") or config.get("training_split") or config.get("validation_split")
    drawn = not (isinstance(config.get("fewshot_config"), dict) and config["fewshot_config"].get("samples"))
    if config.get("num_fewshot") and drawn and fewshot not in known:
        raise TaskError(
            f"{path}: data_files: task {task} shows {config['num_fewshot']} examples of the split {fewshot!r}, and the file names none of it: "
            "name it, or set num_fewshot: 0"
        )
    return config | over, json.dumps({"include": [str(theirs)], **over})


def _task_named(root: Path, task: str) -> Path | None:
    """The file of the package that says ``task: NAME``; most are called as their task."""
    says = re.compile(
        rb"""^["']?task["']?:\s*["']?""" + re.escape(task.encode()) + rb"""["']?\s*(?:#.*)?$""", re.MULTILINE
    )
    every = sorted(root.rglob("*.yaml"), key=lambda path: (path.stem != task, str(path)))
    return next((path for path in every if says.search(path.read_bytes())), None)


def _with_included(path: Path, folder: Path, read: list[Path]) -> dict[Any, Any]:
    """The file's keys over those of the files that it includes."""
    if path in read or len(read) >= INCLUDED:
        raise TaskError(f"{path}: it includes itself, or more than {INCLUDED} files")
    read.append(path)
    try:
        if path.stat().st_size > LARGEST:
            raise TaskError(f"{path}: more than {LARGEST >> 20} MiB")
        config = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a SafeLoader
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} cannot be read: {error}") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise TaskError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(config, dict):
        raise TaskError(f"{path}: expected keys with values")
    _count(config, path, [0])
    included = config.get("include")
    if included is None:
        return config
    if not isinstance(included, str):
        raise TaskError(f"{path}: include must be the name of one file")
    other = (path.parent / included).resolve()
    if not other.is_relative_to(folder) or not other.is_file():
        raise TaskError(f"{path}: include {included[:100]!r}: no such file in {folder}")
    return _with_included(other, folder, read) | config


def _count(value: Any, path: Path, seen: list[int]) -> None:
    """An alias can make a few lines stand for more values than a machine can walk through."""
    seen[0] += 1
    if seen[0] > NODES:
        raise TaskError(f"{path}: more than {NODES} values")
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        _count(part, path, seen)


def _functions(value: Any) -> list[Function]:
    if isinstance(value, Function):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [found for part in parts for found in _functions(part)]


def _data(path: Path, said: Any) -> tuple[Path, ...]:
    """The data files, which lie in the folder."""
    if not isinstance(said, dict) or set(said) != {"data_files"}:
        raise TaskError(f"{path}: dataset_kwargs must be {{data_files: …}}, with local files, and nothing else")
    files = said["data_files"]
    listed = list(files.values()) if isinstance(files, dict) else [files]
    names = [name for one in listed for name in (one if isinstance(one, list) else [one])]
    known = {file.resolve() for file in item_files(path.parent)}
    found = []
    for name in names:
        if not isinstance(name, str) or "://" in name or any(letter in name for letter in "*?["):
            raise TaskError(f"{path}: data_files: {str(name)[:100]!r} must be the name of one local file")
        place = (path.parent / name).resolve()
        if place not in known:
            raise TaskError(
                f"{path}: data_files: no file {name[:100]!r} in {path.parent} ({', '.join(SUFFIXES)}); nothing is read from elsewhere"
            )
        found.append(place)
    if not found:
        raise TaskError(f"{path}: data_files names no file")
    return tuple(found)
