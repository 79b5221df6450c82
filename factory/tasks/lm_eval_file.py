"""Reads a task file of lm-eval before lm-eval reads it: its includes and its data files. Refuses keys that are not allowed.

A file that names a task and has no ``doc_to_text`` means the task of that name in the lm-eval package, with data from the folder:

    task: arc_easy
    dataset_kwargs: {data_files: {test: ARC-Easy-Test.jsonl}}

Refused are data from outside the folder, Python functions unless the policy allows them, downloaded prompts and data sets, pictures and
sound. Its Jinja templates can run any code, so lm-eval itself runs in the sandbox (``lm_eval_run``).
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

from factory.core.errors import suggest_name
from factory.ingest.rules.task_folder import SUFFIXES, get_data_suffix, list_item_files
from factory.tasks.items import TaskError, make_repeated_id_message, make_unreadable_file_message
from kernels.contract.message import Message

LARGEST = 1 << 20  # bytes of a YAML file
NODES = 20_000  # values in a YAML file
INCLUDED = 20  # files in a chain of includes
READERS = ("json", "csv", "parquet")  # readers of the library datasets for local files
SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
# Parts of a task's hash: how such tasks are measured. Another text makes every such task a new task.
ROLLING = " ".join(("with BOS before and in", "each whole text"))
SHOTS = " ".join(("examples drawn with", "lm-eval's seed"))
KEYS = frozenset(
    {
        "task", "task_alias", "tag", "dataset_path", "dataset_name", "dataset_kwargs", "training_split", "validation_split",
        "test_split", "fewshot_split", "process_docs", "doc_to_text", "doc_to_target", "doc_to_choice", "process_results",
        "description", "target_delimiter", "fewshot_delimiter", "fewshot_config", "num_fewshot", "metric_list", "output_type",
        "generation_kwargs", "repeats", "filter_list", "should_decontaminate", "doc_to_decontamination_query", "gen_prefix",
        "metadata", "include",
    }
)  # fmt: skip
TEXT_ONLY = Message("lm_eval_file.text_only", "The models read only text")
REFUSED = {
    "custom_dataset": Message("lm_eval_file.custom_dataset", "This key loads data with Python code"),
    "unsafe_code": Message(
        "lm_eval_file.unsafe_code",
        "This key runs programs that the model writes, and uses no sandbox. Write a task of kind 'code', or put the "
        "benchmark's published file into the folder of tasks",
    ),
    "use_prompt": Message("lm_eval_file.use_prompt", "This key downloads prompts"),
    "doc_to_image": TEXT_ONLY,
    "doc_to_audio": TEXT_ONLY,
    "class": Message("lm_eval_file.python_class", "This key runs Python code"),
    "group": Message("lm_eval_file.group", "This key groups tasks. Write a separate file for each task"),
}


class _Loader(yaml.SafeLoader):
    """A safe loader that reads ``!function`` as a ``PythonFunction``."""


@dataclass(frozen=True)
class PythonFunction:
    """A value that ``!function`` marks: the name of a Python function."""

    name: str


_Loader.add_constructor("!function", lambda loader, node: PythonFunction(str(node.value)))


@dataclass(frozen=True)
class LmEvalFile:
    """The parts of a task file that the factory uses."""

    task: str  # lm-eval's name of the task
    output_type: str
    shots: int
    data: tuple[Path, ...]
    cluster_by: str  # a key of its records; empty: each record is its own cluster
    answer_key: str  # the key of the answer in its records; empty: a template gives the answer
    sha256: str  # of the file, its includes, the Python files beside it if they may run, and lm-eval's version
    version: str
    shipped: str = ""  # for a task of the package: the keys that override the package's file, as JSON


def read_lm_eval_file(path: Path, functions: bool) -> LmEvalFile:
    """Read and check a task file. ``functions``: allow Python functions. Raises: TaskError naming the file, the key and the reason."""
    read: list[Path] = []
    local = _with_included(path, path.parent.resolve(), read)
    found = list(_functions(local))
    if found and not functions:
        raise TaskError(
            "lm_eval_file.function",
            "{file}: !function {function} runs Python. To allow this in the sandbox, set 'functions: true' in tasks.yaml",
            file=path, function=found[0].name,
        )  # fmt: skip
    config, shipped = (local, "") if {"doc_to_text", "output_type"} & set(local) else _shipped(path, local, read)
    for key in config:
        if key in REFUSED:
            raise TaskError(
                "lm_eval_file.refused_key",
                "{file}: key {key!r} is not allowed. {reason}",
                file=path,
                key=key,
                reason=REFUSED[key],
            )
        if key not in KEYS:
            raise TaskError(
                "lm_eval_file.unknown_key",
                "{file}: unknown key {key!r}{hint}",
                file=path,
                key=str(key)[:80],
                hint=suggest_name(str(key), KEYS),
            )
    task = config.get("task")
    if not isinstance(task, str) or not task:
        raise TaskError("lm_eval_file.no_task", "{file}: key 'task' must be the name of one task", file=path)
    reader = config.get("dataset_path")
    if reader not in READERS:
        raise TaskError(
            "lm_eval_file.no_local_data",
            "{file}: dataset_path {given!r} is refused, because the factory downloads no data. Put the data file "
            "into the same folder. Then write, for example, 'dataset_path: json' and 'dataset_kwargs: {{data_files: "
            "{{test: questions.jsonl}}}}'",
            file=path,
            given=str(reader)[:80],
        )
    if config.get("dataset_name") is not None:
        raise TaskError(
            "lm_eval_file.dataset_name",
            "{file}: remove key 'dataset_name', because local data files have no subsets",
            file=path,
        )
    for metric in config.get("metric_list") or ():
        if isinstance(metric, dict) and metric.get("hf_evaluate"):
            raise TaskError(
                "lm_eval_file.hf_evaluate",
                "{file}: key 'metric_list' must not use hf_evaluate, which downloads code",
                file=path,
            )
    data = _data(path, config.get("dataset_kwargs"))
    metadata = config.get("metadata") or {}
    cluster_by = metadata.get("cluster_by", "") if isinstance(metadata, dict) else ""
    if not isinstance(cluster_by, str):
        raise TaskError(
            "lm_eval_file.cluster_by", "{file}: metadata.cluster_by must be the name of a key of the items", file=path
        )
    target = config.get("doc_to_target")
    version = read_lm_eval_version()
    code = sorted(path.parent.glob("*.py")) if found else []
    parts = [hashlib.sha256(file.read_bytes()).hexdigest() for file in [*read, *code]]
    if config.get("output_type") == "loglikelihood_rolling":
        parts.append(ROLLING)
    if config.get("num_fewshot"):
        parts.append(SHOTS)
    shots = config.get("num_fewshot") or 0
    if not isinstance(shots, int) or isinstance(shots, bool) or not 0 <= shots <= 100:
        raise TaskError("lm_eval_file.num_fewshot", "{file}: num_fewshot must be an integer from 0 to 100", file=path)
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


def refuse_invalid_records(file: LmEvalFile, records: Sequence[Mapping[str, Any]], where: str) -> None:
    """Check the records of a data file, because lm-eval does not: it takes the name of a missing key as the answer.

    Raises: TaskError naming the first record without an answer or cluster, or with a repeated id.
    """
    ids: dict[str, int] = {}
    for number, record in enumerate(records, 1):
        for key in filter(None, (file.answer_key, file.cluster_by)):
            if (value := record.get(key)) in (None, ""):
                raise TaskError(
                    "lm_eval_file.missing_key",
                    "{file}, record {record}: key {key!r} is missing",
                    file=where,
                    record=number,
                    key=key,
                )
            if isinstance(value, float) and not math.isfinite(value):
                raise TaskError(
                    "lm_eval_file.not_finite", "{file}, record {record}: key {key!r} is {value}, which is not an answer",
                    file=where, record=number, key=key, value=value,
                )  # fmt: skip
        if (name := record.get("id")) is not None and (first := ids.setdefault(str(name), number)) != number:
            raise TaskError(make_repeated_id_message(where, str(name)[:100], first, number))
        text = json.dumps(record, ensure_ascii=False, default=repr)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TaskError(
                "lm_eval_file.half_character", "{file}, record {record}: {text!r} is only half of a character. Write the whole character",
                file=where, record=number, text=text[error.start],
            ) from None  # fmt: skip


def read_lm_eval_version() -> str:
    """The version of the installed lm-eval. Raises: TaskError if it is not installed."""
    try:
        return importlib.metadata.version("lm-eval")
    except importlib.metadata.PackageNotFoundError:
        raise TaskError(
            "lm_eval_file.not_installed",
            "This task file needs lm-eval, which is not installed. Install it: pip install 'llm-factory[evals]'",
        ) from None


def _shipped(path: Path, local: dict[Any, Any], read: list[Path]) -> tuple[dict[Any, Any], str]:
    """(the keys of the package's task and of the file, the keys that override the package's file as JSON). Nothing is downloaded."""
    task = local.get("task")
    if not isinstance(task, str) or not task:
        return local, ""
    read_lm_eval_version()
    found = importlib.util.find_spec("lm_eval")
    assert found is not None and found.origin is not None
    root = Path(found.origin).parent / "tasks"
    theirs = _task_named(root, task)
    if theirs is None:
        raise TaskError(
            "lm_eval_file.not_shipped",
            "{file} has no doc_to_text, and lm-eval {version} has no task {task!r}. Write the whole task, or give the name of a task of lm-eval",
            file=path, version=read_lm_eval_version(), task=task[:100],
        )  # fmt: skip
    config = _with_included(theirs, root.resolve(), read) | local
    files = _data(path, local.get("dataset_kwargs"))
    named = local["dataset_kwargs"]["data_files"]
    known = (
        set(named) if isinstance(named, dict) else {"train"}
    )  # the name that the library datasets gives to unnamed data
    suffix = get_data_suffix(files[0]).removesuffix(".gz")
    over: dict[str, Any] = {
        "dataset_path": {".csv": "csv", ".parquet": "parquet"}.get(suffix, "json"),
        "dataset_name": None,
    }
    over |= {split: None for split in SPLITS if config.get(split) not in known}
    asked = config.get("test_split") or config.get("validation_split")
    if not {config.get("test_split"), config.get("validation_split")} & known:
        raise TaskError(
            "lm_eval_file.no_test_split", "{file}: task {task} is measured on the split {split!r}. Add the file of this split to data_files",
            file=path, task=task, split=asked,
        )  # fmt: skip
    fewshot = config.get("fewshot_split") or config.get("training_split") or config.get("validation_split")
    drawn = not (isinstance(config.get("fewshot_config"), dict) and config["fewshot_config"].get("samples"))
    if config.get("num_fewshot") and drawn and fewshot not in known:
        raise TaskError(
            "lm_eval_file.no_fewshot_split",
            "{file}: task {task} shows {shots} examples from the split {split!r}. Add the file of this split to data_files, or set 'num_fewshot: 0'",
            file=path, task=task, shots=config["num_fewshot"], split=fewshot,
        )  # fmt: skip
    return config | over, json.dumps({"include": [str(theirs)], **over})


def _task_named(root: Path, task: str) -> Path | None:
    """The package's file with the line ``task: NAME``. Most files are named like their task, so these are searched first."""
    says = re.compile(
        rb"""^["']?task["']?:\s*["']?""" + re.escape(task.encode()) + rb"""["']?\s*(?:#.*)?$""", re.MULTILINE
    )
    every = sorted(root.rglob("*.yaml"), key=lambda path: (path.stem != task, str(path)))
    return next((path for path in every if says.search(path.read_bytes())), None)


def _with_included(path: Path, folder: Path, read: list[Path]) -> dict[Any, Any]:
    """The file's keys, and the keys of its included files that the file does not have."""
    if path in read or len(read) >= INCLUDED:
        raise TaskError(
            "lm_eval_file.circular_include",
            "{file} includes itself, or more than {limit} files are included",
            file=path,
            limit=INCLUDED,
        )
    read.append(path)
    try:
        if path.stat().st_size > LARGEST:
            raise TaskError(
                "lm_eval_file.too_large", "{file} has more than {limit} MiB", file=path, limit=LARGEST >> 20
            )
        config = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a SafeLoader
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(make_unreadable_file_message(path, error)) from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise TaskError(
            "lm_eval_file.no_yaml",
            "{file} cannot be read as YAML: {reason}",
            file=path,
            reason=" ".join(str(error).split())[:300],
        ) from None
    if not isinstance(config, dict):
        raise TaskError("lm_eval_file.no_mapping", "{file} must be a mapping of keys to values", file=path)
    _count(config, path, [0])
    included = config.get("include")
    if included is None:
        return config
    if not isinstance(included, str):
        raise TaskError("lm_eval_file.odd_include", "{file}: key 'include' must be the name of one file", file=path)
    other = (path.parent / included).resolve()
    if not other.is_relative_to(folder) or not other.is_file():
        raise TaskError(
            "lm_eval_file.no_include",
            "{file}: included file {included!r} is not in {folder}",
            file=path,
            included=included[:100],
            folder=folder,
        )
    return _with_included(other, folder, read) | config


def _count(value: Any, path: Path, seen: list[int]) -> None:
    """Refuse too many values: with YAML aliases, a few lines can stand for billions of values."""
    seen[0] += 1
    if seen[0] > NODES:
        raise TaskError("lm_eval_file.too_many_values", "{file} has more than {limit:,} values", file=path, limit=NODES)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        _count(part, path, seen)


def _functions(value: Any) -> list[PythonFunction]:
    if isinstance(value, PythonFunction):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [found for part in parts for found in _functions(part)]


def _data(path: Path, said: Any) -> tuple[Path, ...]:
    """The paths of the data files. Raises: TaskError for a file outside the folder."""
    if not isinstance(said, dict) or set(said) != {"data_files"}:
        raise TaskError(
            "lm_eval_file.dataset_kwargs",
            "{file}: dataset_kwargs must be {{data_files: …}} with local files",
            file=path,
        )
    files = said["data_files"]
    listed = list(files.values()) if isinstance(files, dict) else [files]
    names = [name for one in listed for name in (one if isinstance(one, list) else [one])]
    known = {file.resolve() for file in list_item_files(path.parent)}
    found = []
    for name in names:
        if not isinstance(name, str) or "://" in name or any(letter in name for letter in "*?["):
            raise TaskError(
                "lm_eval_file.odd_data_file",
                "{file}: key 'data_files' has {name!r}, which is not the name of one local file",
                file=path,
                name=str(name)[:100],
            )
        place = (path.parent / name).resolve()
        if place not in known:
            raise TaskError(
                "lm_eval_file.no_data_file", "{file}: key 'data_files' asks for {name!r}, but {folder} has no such file. "
                "Allowed suffixes: {suffixes}",
                file=path, folder=path.parent, name=name[:100], suffixes=SUFFIXES,
            )  # fmt: skip
        found.append(place)
    if not found:
        raise TaskError("lm_eval_file.no_data_files", "{file}: key 'data_files' has no file", file=path)
    return tuple(found)
