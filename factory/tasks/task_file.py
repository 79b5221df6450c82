"""Reads a task: ``policies/tasks/NAME.yaml`` of the workspace, and the file of its items in the same folder.

    kind: multiple_choice
    items: questions.jsonl
    format: cloze

A YAML file with ``kind`` or ``published`` has this format. Any other YAML file is a task file of lm-eval (``lm_eval_file``). The published file
of a benchmark, such as ``HumanEval.jsonl.gz``, is a task without a YAML file, recognised by its fields (``published``). A task's protocol is
everything that changes the meaning of its score except the items. Scores are compared only under the same protocol.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from factory.core.errors import ConfigError, InputError, suggest_name
from factory.core.policy_file import Count, StrictPolicy
from factory.core.workspace import Workspace, load_yaml
from factory.ingest.rules.task_folder import SUFFIXES, get_data_suffix, list_item_files, list_unreadable_files
from factory.ingest.rules.task_items import ItemFile, read_items
from factory.tasks.file_rules import (
    refuse_examples_among_items,
    refuse_repeated_records,
    replace_answers_with_choice_indices,
)
from factory.tasks.items import TaskError, TaskItem, make_unreadable_file_message, parse_items, parse_published_items
from factory.tasks.lm_eval_file import LmEvalFile, read_lm_eval_file, refuse_invalid_records
from factory.tasks.policy import TasksPolicy
from factory.tasks.published.benchmarks import (
    ASKED,
    BENCHMARKS,
    TRAINED,
    PublishedError,
    convert_records,
    parse_subject_and_split,
    recognise_benchmark,
)
from factory.tasks.published.record_form import Benchmark
from factory.tasks.reply import choose_default_stop_texts
from kernels.contract.message import Message
from kernels.contract.strict import parse

# Versions of the scorers. Another number makes every task of the kind a new task. Version 2: choices with equal scores share the point, answers are
# compared by their mathematical form, and programs run as Python runs a file.
VERSIONS = {"multiple_choice": 2, "maths": 2, "code": 2, "lm-eval": 1}
FOLDER = "policies/tasks"
CLOZE_PROMPT = "Question: {question}\nAnswer:"
LETTER_PROMPT = "{question}\n{choices}\nAnswer:"
LATER_KEYS, LATER_OF_ITEMS = (
    ("published", "header"),
    ("subject", "begins", "libraries"),
)  # keys that the first protocols did not have


class TaskFile(StrictPolicy):
    """``policies/tasks/NAME.yaml``. NAME is the task's name."""

    kind: Literal["multiple_choice", "maths", "code"]
    """multiple_choice: the likeliest choice must be the right one; maths: the reply must end with the right answer; code: the tests must pass."""
    items: str
    """The file of the items, in this file's folder: .jsonl, .json, .csv (each also .gz), .parquet, or a folder of 0.json, 1.json …"""
    published: Literal["", "humaneval", "mbpp", "bigcodebench", "gsm8k", "math", "mmlu", "arc", "hellaswag"] = ""
    """The benchmark whose published file ``items`` is. It sets ``kind`` and the defaults of all other keys."""
    format: Literal["cloze", "letter"] = "cloze"
    """For multiple_choice. cloze: score each choice's text after the question; letter: show the choices and score their letters."""
    prompt: str = ""
    """The template of a question, with {question} and, in letter format, {choices}. Default: the template of ARC (cloze, maths) or MMLU (letter)
    in lm-eval. For code: the item's prompt."""
    header: str = ""
    """Text before examples and question. {subject} stands for the item's subject."""
    examples: str = ""
    """A file like ``items``. The first ``shots`` of its items are shown with their answers before each question."""
    shots: Annotated[int, Field(ge=0, le=100)] = 0
    """Examples with answers before each question."""
    max_tokens: Count = 256
    """The most tokens of a generated answer."""
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=20)] | None = None
    """Texts that end a generated answer. Default for maths: the prompt's beginning, which starts a next question. For code: a new statement at the
    left margin."""
    samples: Annotated[int, Field(ge=1, le=1000)] = 1
    """Generated answers for each item."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """The temperature of sampling. 0: greedy."""
    pass_at: Annotated[list[Count], Field(min_length=1)] = Field(default_factory=lambda: [1])
    """The values of k in pass@k: the chance that one of k answers is right, estimated without bias (Chen et al. 2021, eq. 1)."""
    seed: int = 0
    """The seed of sampling."""

    @model_validator(mode="after")
    def _whole(self) -> TaskFile:
        if self.shots and not self.examples and not self.published:
            raise ValueError("shots: name the file of the examples (examples)")
        if max(self.pass_at) > self.samples:
            raise ValueError(
                f"pass_at: pass@{max(self.pass_at)} needs at least {max(self.pass_at)} samples, not {self.samples}"
            )
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("samples: with temperature 0 all samples are the same. Set a temperature above 0")
        wanted = {"multiple_choice": {"question"}, "maths": {"question"}, "code": set()}[self.kind]
        if self.kind == "multiple_choice" and self.format == "letter":
            wanted = {"question", "choices"}
        if self.prompt and _names("prompt", self.prompt) != wanted:
            names = " and ".join(f"{{{name}}}" for name in sorted(wanted)) or "nothing"
            raise ValueError(f"prompt: the names in braces must be exactly {names}")
        if not _names("header", self.header) <= {"subject"}:
            raise ValueError("header: the only name in braces may be {subject}")
        return self

    @property
    def template(self) -> str:
        if self.prompt or self.kind == "code":
            return self.prompt
        return LETTER_PROMPT if self.kind == "multiple_choice" and self.format == "letter" else CLOZE_PROMPT

    @property
    def stop_texts(self) -> tuple[str, ...]:
        if self.stop is not None:
            return tuple(self.stop)
        if self.kind == "code":
            return ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # Chen et al. 2021, §2.1, for functions
        return choose_default_stop_texts(self.template)


def _names(key: str, template: str) -> set[str]:
    """The names in braces. Raises: ValueError for unclosed braces."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    return {f"{name}{spec}{conversion or ''}" for _, name, spec, conversion in parts if name is not None}


@dataclass(frozen=True)
class EvalTask:
    """A task's file and items, with their hashes."""

    name: str
    path: Path
    file: TaskFile | LmEvalFile
    items_sha256: tuple[str, ...]
    items: tuple[Any, ...] = ()  # empty for a task of lm-eval, which reads its own items
    examples: tuple[Any, ...] = ()
    records: tuple[Any, ...] = field(default=(), repr=False)  # the files' records, unchanged
    notes: tuple[Message, ...] = ()  # remarks about the items that are not errors

    @property
    def kind(self) -> str:
        return "lm-eval" if isinstance(self.file, LmEvalFile) else self.file.kind

    @property
    def format(self) -> str:
        """A description of how the task is measured, which must stay the same from release to release."""
        if isinstance(self.file, LmEvalFile):
            return f"lm-eval {self.file.version}, {self.file.output_type}, {self.file.shots} shots"
        kind = self.kind.replace("_", " ")
        first = f"{kind} in {self.file.format} format" if self.kind == "multiple_choice" else kind
        if self.file.published:
            first = f"{self.file.published} as published, {first}"
        drawn = (
            ""
            if self.kind == "multiple_choice"
            else f", {self.file.samples} samples at temperature {self.file.temperature:g}"
        )
        return f"{first}, {self.file.shots} shots{drawn}"

    @property
    def protocol_sha256(self) -> str:
        """A hash of everything that changes the meaning of the score, except the items."""
        if isinstance(self.file, LmEvalFile):
            said = self.file.sha256
        else:
            said = _file_sha256(self.file.model_copy(update={"items": "", "examples": ""}))
        examples = [_told(item, LATER_OF_ITEMS) for item in self.shown_examples]
        return _sha256([VERSIONS[self.kind], self.kind, said, examples])

    @property
    def shown_examples(self) -> tuple[Any, ...]:
        """The examples that are shown before questions: the first ``shots`` of each subject."""
        return choose_first_examples_of_subjects(self.examples, self.file.shots)

    def make_evaluation_identity(self, tokenizer_sha256: str) -> str:
        """The identity of this task's evaluations. Evaluations with the same identity have the same items and protocol."""
        return "task:" + _sha256([self.name, self.protocol_sha256, self.items_sha256, tokenizer_sha256])


def choose_first_examples_of_subjects(examples: Sequence[Any], shots: int) -> tuple[Any, ...]:
    """The first ``shots`` examples of each subject."""
    subjects = dict.fromkeys(item.subject for item in examples)
    return tuple(one for subject in subjects for one in [o for o in examples if o.subject == subject][:shots])


def task_folder(workspace: Workspace) -> Path:
    """The folder of a workspace's task files."""
    return workspace.root / FOLDER


@dataclass(frozen=True)
class TaskFolderFiles:
    """The files in a folder of tasks."""

    tasks: dict[str, Path]
    """The tasks by name: YAML files, and published files of benchmarks that no YAML file names."""
    others: dict[str, Message]
    """The other data files, by their name in the folder, and why each is not a task."""


def list_tasks(folder: Path) -> TaskFolderFiles:
    """List the tasks of a folder, and the data files that are not tasks. Files whose names begin with _ are parts for includes."""
    yamls = sorted(folder.glob("*.yaml"))
    tasks = {path.stem: path for path in yamls if not path.name.startswith("_")}
    named = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in yamls if path.is_file())
    others = {
        str(path.relative_to(folder)): Message(
            "task_file.not_read",
            "This file is ignored, so its items may be in the training data. Only files with these suffixes are read: {suffixes}",
            suffixes=SUFFIXES,
        )
        for path in list_unreadable_files(folder)
    }
    for path in list_item_files(folder):
        name = str(path.relative_to(folder))
        if path.name.startswith("_") or re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", named):
            continue
        no_file_names_it = Message("task_file.not_named", "No task file refers to this file")
        known, why = _published_name(path) if path.parent == folder else ("", no_file_names_it)
        if known and known not in tasks:
            tasks[known] = path
            continue
        why = why or Message(
            "task_file.same_name",
            "File {other} already defines task {task}. Rename or remove one of the two files",
            other=tasks[known].name,
            task=known,
        )
        others[name] = Message(
            "task_file.no_task",
            "This file cannot be used as a task: {reason} Its items are still kept out of the training data.",
            reason=why,
        )
    return TaskFolderFiles(dict(sorted(tasks.items())), others)


def _published_name(path: Path) -> tuple[str, Message | None]:
    """(the name of a published file's task, None), or ("", why the file is not a task). A file that cannot be read counts as a task."""
    stem = path.name.removesuffix(get_data_suffix(path))
    about, split = parse_subject_and_split(stem)
    try:
        records = read_items(path).records
    except InputError:
        return stem, None
    benchmark = recognise_benchmark(records)
    if benchmark is None:
        return "", Message(
            "task_file.unknown_fields",
            "No known benchmark has the fields of this file ({fields}). To make the file a task, write a YAML "
            "file with 'kind' and 'items: {file}'",
            fields=", ".join(sorted(records[0]))[:120] if records else "none",
            file=path.name,
        )
    if split in TRAINED:
        return "", Message(
            "task_file.training_split",
            "This file is the {split} split of {benchmark}. To show its records as examples, write its name as 'examples' in the YAML file of a task",
            split=split,
            benchmark=benchmark.name,
        )
    return (benchmark.name if split in ASKED and not about else stem), None


def load_task_by_name(workspace: Workspace, name: str, policy: TasksPolicy) -> EvalTask:
    """Read the task ``name``. Raises: TaskError if there is no such task, and like ``load_task``."""
    folder = task_folder(workspace)
    known = list_tasks(folder).tasks
    if not known:
        raise TaskError(
            "task_file.empty_folder",
            "There is no task {task!r}, because {folder} has no task file",
            task=name,
            folder=folder,
        )
    if name not in known:
        raise TaskError(
            "task_file.unknown_task", "There is no task {task!r}{hint}", task=name, hint=suggest_name(name, known)
        )
    return load_task(known[name], policy)


def load_task(path: Path, policy: TasksPolicy) -> EvalTask:
    """Read a task file or the published file of a benchmark, and its items. Raises: TaskError naming the file, the record and the key."""
    try:
        if get_data_suffix(path) or path.is_dir():
            return _published_alone(path, policy)
        if not path.exists():
            raise TaskError("task_file.no_file", "{file} does not exist", file=path)
        if path.suffix != ".yaml" or path.name.startswith("_") or len(path.stem) > 100:
            raise TaskError(
                "task_file.odd_name",
                "{file} is not the file of a task. A task is NAME.yaml (at most 100 letters, no '_' at the start) or a published file with one of "
                "these suffixes: {suffixes}. Unpack an archive first",
                file=path,
                suffixes=SUFFIXES,
            )
        if not _ours(path):
            file = read_lm_eval_file(path, policy.functions)
            data = [read_items(data) for data in file.data]
            records = tuple(record for one in data for record in one.records)
            _enough(path, len(records), policy)
            for one in data:
                refuse_invalid_records(file, one.records, str(one.path))
            refuse_repeated_records([(one.path.name, one.records) for one in data], file.shots)
            return EvalTask(path.stem, path, file, tuple(one.sha256 for one in data), records=records)
        said = load_yaml(path)
        keys: dict[str, Any] = said if isinstance(said, dict) else {}
        benchmark = BENCHMARKS.get(str(keys.get("published") or ""))
        ours = parse(TaskFile, {**_keys(benchmark), **keys} if benchmark else said, str(path), TaskError)
        items = read_items(resolve_data_file(path, "items", ours.items))
        shown = read_items(resolve_data_file(path, "examples", ours.examples)) if ours.examples else None
        if benchmark:
            return _published(path, benchmark, ours, items, shown, policy, "shots" in keys)
        found = replace_answers_with_choice_indices(
            parse_items(ours.kind, items.records, str(items.path)), str(items.path)
        )
        _enough(items.path, len(found), policy)
        if shown and ours.kind == "code":
            raise TaskError(
                "task_file.examples_of_code",
                "{file}: remove key 'examples', because prompts of a task of kind 'code' show no examples",
                file=path,
            )
        examples = (
            replace_answers_with_choice_indices(parse_items(ours.kind, shown.records, str(shown.path)), str(shown.path))
            if shown
            else []
        )
    except (ConfigError, InputError) as error:
        raise TaskError(error.message) from error
    if shown:
        _enough_shown(ours, examples, found, shown.path)
    return EvalTask(path.stem, path, ours, (items.sha256,), tuple(found), tuple(examples), tuple(items.records))


def _keys(benchmark: Benchmark) -> dict[str, Any]:
    return {"kind": benchmark.kind, "published": benchmark.name, **benchmark.keys}


def _published_alone(path: Path, policy: TasksPolicy) -> EvalTask:
    """The task of a published file that no YAML file names."""
    items = read_items(path)
    benchmark = recognise_benchmark(items.records)
    name, why = _published_name(path)
    if benchmark is None or not name:
        raise TaskError("task_file.not_published", "{file} is not a task. {reason}", file=path, reason=why or "")
    keys = {**_keys(benchmark), "items": path.name}
    found = _published(path, benchmark, parse(TaskFile, keys, str(path), TaskError), items, None, policy, False)
    return replace(found, name=name)


def _published(
    path: Path,
    benchmark: Benchmark,
    file: TaskFile,
    items: ItemFile,
    shown: ItemFile | None,
    policy: TasksPolicy,
    shots_said: bool,
) -> EvalTask:
    """The task of a benchmark. Its examples come from ``shown``, or else from the benchmark's own file."""
    if file.kind != benchmark.kind:
        raise TaskError(
            "task_file.other_kind", "{file}: key 'kind' is {given!r}, but tasks of {benchmark} have the kind {kind!r}",
            file=path, given=file.kind, benchmark=benchmark.name, kind=benchmark.kind,
        )  # fmt: skip
    lenient = file.kind == "multiple_choice" and file.format == "letter"
    tested, beside_them, notes = _records(benchmark, items, lenient)
    _enough(items.path, len(tested), policy)
    if shown:
        more, of_file, _ = _records(benchmark, shown, lenient)
        examples = of_file or more
    else:
        examples = beside_them
        if not shots_said:
            file = file.model_copy(update={"shots": min(benchmark.shown, len(examples))})
    _enough_shown(file, examples, tested, shown.path if shown else items.path)
    return EvalTask(
        path.stem, path, file, (items.sha256,), tuple(tested), tuple(examples), tuple(items.records), tuple(notes)
    )


def _records(benchmark: Benchmark, file: ItemFile, lenient: bool) -> tuple[list[Any], list[Any], list[Message]]:
    """(tested items, example items, notes)."""
    where = str(file.path)
    try:
        found = convert_records(benchmark, file.records, file.path.name.removesuffix(get_data_suffix(file.path)))
    except PublishedError as error:
        raise TaskError("task_file.odd_record", "{file}, {problem}", file=where, problem=error.message) from None
    tested, notes = parse_published_items(benchmark.kind, found.tested, where, lenient)
    shown, _ = parse_published_items(benchmark.kind, found.shown, where, lenient)
    return tested, shown, notes


def _enough_shown(file: TaskFile, examples: Sequence[TaskItem], items: Sequence[TaskItem], where: Path) -> None:
    refuse_examples_among_items(items, choose_first_examples_of_subjects(examples, file.shots), str(where))
    for subject in dict.fromkeys(item.subject for item in items):
        count = sum(one.subject == subject for one in examples)
        if count < file.shots:
            data = {"file": where, "count": count, "shots": file.shots}
            if subject:
                raise TaskError(
                    "task_file.few_examples_of_subject",
                    "{file}: subject {subject!r} has {count:,|example|examples}, but key 'shots' asks for {shots}",
                    subject=subject,
                    **data,
                )
            raise TaskError(
                "task_file.few_examples",
                "{file} has {count:,|example|examples}, but key 'shots' asks for {shots}",
                **data,
            )


def _file_sha256(file: TaskFile) -> str:
    """A hash of the keys. A later key counts only if it is used, so that older tasks keep their protocol."""
    unused = {key for key in LATER_KEYS if not getattr(file, key)}
    return hashlib.sha256(file.model_dump_json(exclude=unused).encode()).hexdigest()


def _told(item: TaskItem, later: tuple[str, ...]) -> dict[str, Any]:
    return item.model_dump(exclude={key for key in later if not getattr(item, key, None)})


def resolve_data_file(path: Path, key: str, name: str) -> Path:
    """The path of a data file that a task file names. Raises: TaskError if it is outside the folder or not a data file."""
    folder, found = path.parent.resolve(), (path.parent / name).resolve()
    if "://" in name or not found.is_relative_to(folder):
        raise TaskError(
            "task_file.outside", "{file}: key {key!r}: {name!r} is outside {folder}. Put the data file into this folder",
            file=path, key=key, name=name, folder=folder,
        )  # fmt: skip
    known = {file.resolve(): file for file in list_item_files(path.parent)}
    if found not in known:
        names = [str(file.relative_to(path.parent)) for file in known.values()]
        raise TaskError(
            "task_file.no_items_file", "{file}: key {key!r}: the folder has no data file {name!r}{hint}",
            file=path, key=key, name=name, hint=suggest_name(name, names) if names else "",
        )  # fmt: skip
    return found


def _ours(path: Path) -> bool:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(make_unreadable_file_message(path, error)) from error
    return any(re.match(r"""(["']?)(kind|published)\1:""", line) for line in lines)


def _enough(path: Path, count: int, policy: TasksPolicy) -> None:
    if count < policy.items_min:
        raise TaskError(
            "task_file.few_items", "{file} has {count:,|item|items}, but at least {limit:,} are needed (items_min in tasks.yaml)",
            file=path, count=count, limit=policy.items_min,
        )  # fmt: skip


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
