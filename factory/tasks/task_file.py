"""A task as its file says it: ``policies/tasks/NAME.yaml`` of the workspace, beside the file of its items.

    kind: multiple_choice
    items: questions.jsonl
    format: cloze

A YAML file that has ``kind`` or ``published`` is one of ours; any other is one of lm-eval's (``lm_eval_file``). The file of a benchmark as the
world publishes it is a task without a YAML file, too: ``HumanEval.jsonl.gz`` is known by its fields (``published``). The protocol of a task is
all that changes what its number means except the items: while a champion of the line was measured under one, nothing is compared under
another.
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

from factory.core.errors import ConfigError, InputError, nearest
from factory.core.policy_file import Count, StrictPolicy
from factory.core.workspace import Workspace, load_yaml
from factory.ingest.rules.task_folder import SUFFIXES, item_files, not_read, suffix_of
from factory.ingest.rules.task_items import ItemFile, read_items
from factory.tasks.file_rules import in_one_way, refuse_shown_items, refuse_shown_records
from factory.tasks.items import TaskError, TaskItem, read_published, read_records
from factory.tasks.lm_eval_file import LmEvalFile, check_records, read_lm_eval_file
from factory.tasks.policy import TasksPolicy
from factory.tasks.published.benchmarks import (
    ASKED,
    BENCHMARKS,
    TRAINED,
    PublishedError,
    items_of,
    recognised,
    split_of,
)
from factory.tasks.published.form import Benchmark
from factory.tasks.reply import stops_of
from trainer.contract.strict import parse

# Of what is measured: another number makes every task of the kind a new one. 2: ties have their share; answers are read by their forms; programs run
# as Python runs them.
VERSIONS = {"multiple_choice": 2, "maths": 2, "code": 2, "lm-eval": 1}
FOLDER = "policies/tasks"
CLOZE_PROMPT = "Question: {question}\nAnswer:"
LETTER_PROMPT = "{question}\n{choices}\nAnswer:"
LATER_KEYS, LATER_OF_ITEMS = ("published", "header"), ("subject", "begins", "libraries")  # than the first protocols


class TaskFile(StrictPolicy):
    """``policies/tasks/NAME.yaml``. The file's name is the task's."""

    kind: Literal["multiple_choice", "maths", "code"]
    """multiple_choice: an answer is chosen by its log-probability; maths: the answer's last number is the right one; code: its tests pass."""
    items: str
    """The file of the items, beside this one: .jsonl, .json, .csv (each also .gz), .parquet, or a folder of 0.json, 1.json …"""
    published: Literal["", "humaneval", "mbpp", "bigcodebench", "gsm8k", "math", "mmlu", "arc", "hellaswag"] = ""
    """Of which benchmark the items are, as the world publishes them. It sets ``kind`` and the keys that the file does not have."""
    format: Literal["cloze", "letter"] = "cloze"
    """Of multiple_choice. cloze: each choice's text is scored after the question; letter: the choices are shown, and their letters scored."""
    prompt: str = ""
    """What is asked, with {question} and, in letter format, {choices}. Default: that of ARC (cloze, maths) or MMLU (letter) in lm-eval;
    code: the item's prompt alone."""
    header: str = ""
    """What stands before examples and question; {subject} is the item's."""
    examples: str = ""
    """A file like ``items``, of which the first ``shots`` are shown with their answers before each question."""
    shots: Annotated[int, Field(ge=0, le=100)] = 0
    """Worked examples before each question."""
    max_tokens: Count = 256
    """The longest generated answer."""
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=20)] | None = None
    """What ends a generated answer. Default: the next question of maths, in the prompt's own form; of code what stands at the left margin after
    the function."""
    samples: Annotated[int, Field(ge=1, le=1000)] = 1
    """Generated answers to each item."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """0: the likeliest answer."""
    pass_at: Annotated[list[Count], Field(min_length=1)] = Field(default_factory=lambda: [1])
    """For each k the chance that one of k answers is right, estimated without bias from all samples (Chen et al. 2021, eq. 1)."""
    seed: int = 0
    """Of the drawn answers."""

    @model_validator(mode="after")
    def _whole(self) -> TaskFile:
        if self.shots and not self.examples and not self.published:
            raise ValueError("shots: which file the examples are of is missing (examples)")
        if max(self.pass_at) > self.samples:
            raise ValueError(
                f"pass_at: pass@{max(self.pass_at)} needs at least as many samples, there are {self.samples}"
            )
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("samples: the likeliest answer is the same each time; set a temperature")
        wanted = {"multiple_choice": {"question"}, "maths": {"question"}, "code": set()}[self.kind]
        if self.kind == "multiple_choice" and self.format == "letter":
            wanted = {"question", "choices"}
        if self.prompt and _names("prompt", self.prompt) != wanted:
            names = " and ".join(f"{{{name}}}" for name in sorted(wanted)) or "nothing"
            raise ValueError(f"prompt: it must hold {names}, as it stands here, and no other name in braces")
        if not _names("header", self.header) <= {"subject"}:
            raise ValueError("header: it may hold {subject}, as it stands here, and no other name in braces")
        return self

    @property
    def template(self) -> str:
        if self.prompt or self.kind == "code":
            return self.prompt
        return LETTER_PROMPT if self.kind == "multiple_choice" and self.format == "letter" else CLOZE_PROMPT

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is not None:
            return tuple(self.stop)
        if self.kind == "code":
            return ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # Chen et al. 2021, §2.1, for functions
        return stops_of(self.template)


def _names(key: str, template: str) -> set[str]:
    """Those in braces. Raises: ValueError for braces that are not closed, or hold more than a name."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    return {f"{name}{spec}{conversion or ''}" for _, name, spec, conversion in parts if name is not None}


@dataclass(frozen=True)
class EvalTask:
    """A task, read: its file, its items and what they are known by."""

    name: str
    path: Path
    file: TaskFile | LmEvalFile
    items_sha256: tuple[str, ...]
    items: tuple[Any, ...] = ()  # of ours; lm-eval reads its own
    examples: tuple[Any, ...] = ()
    records: tuple[Any, ...] = field(default=(), repr=False)  # as they lie in the files
    notes: tuple[str, ...] = ()  # what is to be said of the items, and makes them no worse

    @property
    def kind(self) -> str:
        return "lm-eval" if isinstance(self.file, LmEvalFile) else self.file.kind

    @property
    def format(self) -> str:
        """In words: what must stay the same in a line of releases."""
        if isinstance(self.file, LmEvalFile):
            return f"lm-eval {self.file.version}, {self.file.output_type}, {self.file.shots} shots"
        first = f"multiple choice in {self.file.format} format" if self.kind == "multiple_choice" else self.kind
        if self.file.published:
            first = f"{self.file.published} as published, {first}"
        drawn = (
            ""
            if self.kind == "multiple_choice"
            else f", {self.file.samples} samples at temperature {self.file.temperature:g}"
        )
        return f"{first}, {self.file.shots} shots{drawn}"

    @property
    def protocol(self) -> str:
        """A hash of all that changes what the number means, the items apart."""
        if isinstance(self.file, LmEvalFile):
            said = self.file.sha256
        else:
            said = _file_sha256(self.file.model_copy(update={"items": "", "examples": ""}))
        examples = [_told(item, LATER_OF_ITEMS) for item in self.shown]
        return _sha256([VERSIONS[self.kind], self.kind, said, examples])

    @property
    def shown(self) -> tuple[Any, ...]:
        """The examples that stand before some question: of each subject as many as there are shots."""
        return shown_examples(self.examples, self.file.shots)

    def identity(self, tokenizer_sha256: str) -> str:
        """What an evaluation of this task is known by: two of the same are on the same items, measured alike."""
        return "task:" + _sha256([self.name, self.protocol, self.items_sha256, tokenizer_sha256])


def shown_examples(examples: Sequence[Any], shots: int) -> tuple[Any, ...]:
    """The examples that stand before some question."""
    subjects = dict.fromkeys(item.subject for item in examples)
    return tuple(one for subject in subjects for one in [o for o in examples if o.subject == subject][:shots])


def task_folder(workspace: Workspace) -> Path:
    """Where a workspace's task files lie."""
    return workspace.root / FOLDER


@dataclass(frozen=True)
class TaskFolder:
    """What lies in a folder of tasks."""

    tasks: dict[str, Path]
    """By name: a YAML file, or the file of a published benchmark that no YAML file names."""
    others: dict[str, str]
    """Every other file that could be one, by its name in the folder, and what becomes of it, in words."""


def look_into(folder: Path) -> TaskFolder:
    """The tasks of a folder, that of lm-eval's too, and what is none. A name that begins with _ is a part that others include."""
    yamls = sorted(folder.glob("*.yaml"))
    tasks = {path.stem: path for path in yamls if not path.name.startswith("_")}
    named = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in yamls if path.is_file())
    others = {
        str(path.relative_to(folder)): f"not read ({', '.join(SUFFIXES)} are), and not kept out of training data"
        for path in not_read(folder)
    }
    for path in item_files(folder):
        name = str(path.relative_to(folder))
        if path.name.startswith("_") or re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", named):
            continue
        known, why = _published_name(path) if path.parent == folder else ("", "no task file names it")
        if known and known not in tasks:
            tasks[known] = path
            continue
        why = why or f"{tasks[known].name} is task {known} already: rename one, or remove it"
        others[name] = f"kept out of training data, but no task: {why}"
    return TaskFolder(dict(sorted(tasks.items())), others)


def _published_name(path: Path) -> tuple[str, str]:
    """(the name of the task that a data file is by itself, why it is none); what cannot be read is a task, which then says so."""
    stem = path.name.removesuffix(suffix_of(path))
    about, split = split_of(stem)
    try:
        records = read_items(path).records
    except InputError:
        return stem, ""
    benchmark = recognised(records)
    if benchmark is None:
        fields = ", ".join(sorted(records[0]))[:120] if records else "none"
        return (
            "",
            f"no published benchmark has its fields ({fields}); a YAML file with 'kind' and 'items: {path.name}' makes it one",
        )
    if split in TRAINED:
        return "", f"the {split} split of {benchmark.name}; a YAML file can name it in 'examples'"
    return (benchmark.name if split in ASKED and not about else stem), ""


def load_named(workspace: Workspace, name: str, policy: TasksPolicy) -> EvalTask:
    """Raises: TaskError when there is no such task, and as ``load_task``."""
    folder = task_folder(workspace)
    known = look_into(folder).tasks
    if name not in known:
        there = nearest(name, known) if known else f"; {folder} holds no task file"
        raise TaskError(f"no evaluation task {name!r}{there}")
    return load_task(known[name], policy)


def load_task(path: Path, policy: TasksPolicy) -> EvalTask:
    """Read a task file, or the file of a published benchmark, and all its items. Raises: TaskError naming the file, the record and the key."""
    try:
        if suffix_of(path) or path.is_dir():
            return _published_alone(path, policy)
        if not path.exists():
            raise TaskError(f"{path}: there is no such file")
        if path.suffix != ".yaml" or path.name.startswith("_") or len(path.stem) > 100:
            raise TaskError(
                f"{path}: the file of a task is NAME.yaml, of at most 100 letters and no '_' before, or a published file "
                f"({', '.join(SUFFIXES)}; unpack an archive)"
            )
        if not _ours(path):
            file = read_lm_eval_file(path, policy.functions)
            data = [read_items(data) for data in file.data]
            records = tuple(record for one in data for record in one.records)
            _enough(path, len(records), policy)
            for one in data:
                check_records(file, one.records, str(one.path))
            refuse_shown_records([(one.path.name, one.records) for one in data], file.shots)
            return EvalTask(path.stem, path, file, tuple(one.sha256 for one in data), records=records)
        said = load_yaml(path)
        keys: dict[str, Any] = said if isinstance(said, dict) else {}
        benchmark = BENCHMARKS.get(str(keys.get("published") or ""))
        ours = parse(TaskFile, {**_keys(benchmark), **keys} if benchmark else said, str(path), TaskError)
        items = read_items(data_file(path, "items", ours.items))
        shown = read_items(data_file(path, "examples", ours.examples)) if ours.examples else None
        if benchmark:
            return _published(path, benchmark, ours, items, shown, policy, "shots" in keys)
        found = in_one_way(read_records(ours.kind, items.records, str(items.path)), str(items.path))
        _enough(items.path, len(found), policy)
        if shown and ours.kind == "code":
            raise TaskError(f"{path}: examples: a task of kind code shows none")
        examples = in_one_way(read_records(ours.kind, shown.records, str(shown.path)), str(shown.path)) if shown else []
    except (ConfigError, InputError) as error:
        raise TaskError(str(error)) from error
    if shown:
        _enough_shown(ours, examples, found, shown.path)
    return EvalTask(path.stem, path, ours, (items.sha256,), tuple(found), tuple(examples), tuple(items.records))


def _keys(benchmark: Benchmark) -> dict[str, Any]:
    return {"kind": benchmark.kind, "published": benchmark.name, **benchmark.keys}


def _published_alone(path: Path, policy: TasksPolicy) -> EvalTask:
    """The file of a benchmark that no YAML file names."""
    items = read_items(path)
    benchmark = recognised(items.records)
    name, why = _published_name(path)
    if benchmark is None or not name:
        raise TaskError(f"{path}: no task: {why}")
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
    """A benchmark's items, and its examples: those of ``shown`` or, without, those that the file itself holds to be shown."""
    if file.kind != benchmark.kind:
        raise TaskError(f"{path}: kind {file.kind}: {benchmark.name} is of kind {benchmark.kind}")
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


def _records(benchmark: Benchmark, file: ItemFile, lenient: bool) -> tuple[list[Any], list[Any], list[str]]:
    """(items that are tested, items that are shown, notes)."""
    where = str(file.path)
    try:
        found = items_of(benchmark, file.records, file.path.name.removesuffix(suffix_of(file.path)))
    except PublishedError as error:
        raise TaskError(f"{where}, {error}") from None
    tested, notes = read_published(benchmark.kind, found.tested, where, lenient)
    shown, _ = read_published(benchmark.kind, found.shown, where, lenient)
    return tested, shown, notes


def _enough_shown(file: TaskFile, examples: Sequence[TaskItem], items: Sequence[TaskItem], where: Path) -> None:
    refuse_shown_items(items, shown_examples(examples, file.shots), str(where))
    for subject in dict.fromkeys(item.subject for item in items):
        count = sum(one.subject == subject for one in examples)
        if count < file.shots:
            of = f" of {subject}" if subject else ""
            raise TaskError(f"{where}: {count} examples{of}, {file.shots} are to be shown (shots)")


def _file_sha256(file: TaskFile) -> str:
    """As a policy's. Keys that came later count where they are used, so that a task keeps its protocol."""
    unused = {key for key in LATER_KEYS if not getattr(file, key)}
    return hashlib.sha256(file.model_dump_json(exclude=unused).encode()).hexdigest()


def _told(item: TaskItem, later: tuple[str, ...]) -> dict[str, Any]:
    return item.model_dump(exclude={key for key in later if not getattr(item, key, None)})


def data_file(path: Path, key: str, name: str) -> Path:
    """A data file that a task file names. Raises: TaskError when it lies outside the folder, or is none."""
    folder, found = path.parent.resolve(), (path.parent / name).resolve()
    if "://" in name or not found.is_relative_to(folder):
        raise TaskError(f"{path}: key {key!r}: {name!r} lies outside {folder}: nothing is read from elsewhere")
    known = {file.resolve(): file for file in item_files(path.parent)}
    if found not in known:
        names = [str(file.relative_to(path.parent)) for file in known.values()]
        raise TaskError(
            f"{path}: key {key!r}: no file {name!r} of items there" + (nearest(name, names) if names else "")
        )
    return found


def _ours(path: Path) -> bool:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} cannot be read: {error}") from error
    return any(re.match(r"""(["']?)(kind|published)\1:""", line) for line in lines)


def _enough(path: Path, count: int, policy: TasksPolicy) -> None:
    if count < policy.items_min:
        raise TaskError(f"{path}: {count} items, at least {policy.items_min} are needed (items_min in tasks.yaml)")


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
