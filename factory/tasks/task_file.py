"""A task as its file says it: ``policies/tasks/NAME.yaml`` of the workspace, beside the file of its items.

    kind: multiple_choice
    items: questions.jsonl
    format: cloze

A YAML file that has ``kind`` is one of ours; any other is one of lm-eval's (``lm_eval_file``). The protocol of a task is all that changes what
its number means except the items: while a champion of the line was measured under one, nothing is compared under another.
"""

from __future__ import annotations

import hashlib
import json
import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from factory.core.errors import ConfigError, InputError, nearest
from factory.core.policy_file import Count, StrictPolicy, policy_sha256
from factory.core.workspace import Workspace, load_yaml
from factory.ingest.rules.task_items import item_files, read_items
from factory.tasks.items import TaskError, TaskItem, read_records
from factory.tasks.lm_eval_file import LmEvalFile, check_records, read_lm_eval_file
from factory.tasks.policy import TasksPolicy
from factory.tasks.reply import stops_of
from trainer.contract.strict import parse

VERSION = 2  # of what is measured: another number makes every task a new one
FOLDER = "policies/tasks"
CLOZE_PROMPT = "Question: {question}\nAnswer:"
LETTER_PROMPT = "{question}\n{choices}\nAnswer:"


class TaskFile(StrictPolicy):
    """``policies/tasks/NAME.yaml``. The file's name is the task's."""

    kind: Literal["multiple_choice", "maths", "code"]
    """multiple_choice: an answer is chosen by its log-probability; maths: the answer's last number is the right one; code: its tests pass."""
    items: str
    """The file of the items, beside this one: .jsonl, .json, .csv or .parquet."""
    format: Literal["cloze", "letter"] = "cloze"
    """Of multiple_choice. cloze: each choice's text is scored after the question; letter: the choices are shown, and their letters scored."""
    prompt: str = ""
    """What is asked, with {question} and, in letter format, {choices}. Default: that of ARC (cloze, maths) or MMLU (letter) in lm-eval;
    code: the item's prompt alone."""
    examples: str = ""
    """A file like ``items``, of which the first ``shots`` are shown with their answers before each question."""
    shots: Annotated[int, Field(ge=0, le=100)] = 0
    """Worked examples before each question."""
    max_tokens: Count = 256
    """The longest generated answer."""
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=20)] | None = None
    """What ends a generated answer. Default: the next question of maths, in the prompt's own form; of code what stands at the left margin after the function."""
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
        if self.shots and not self.examples:
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
        if self.prompt:
            try:
                parts = list(string.Formatter().parse(self.prompt))
            except ValueError as error:
                raise ValueError(f"prompt: {error}") from None
            if {name for _, name, _, _ in parts if name is not None} != wanted or any(s or c for _, _, s, c in parts):
                names = " and ".join(f"{{{name}}}" for name in sorted(wanted)) or "nothing"
                raise ValueError(f"prompt: it must hold {names}, as it stands here, and no other name in braces")
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

    @property
    def kind(self) -> str:
        return "lm-eval" if isinstance(self.file, LmEvalFile) else self.file.kind

    @property
    def format(self) -> str:
        """In words: what must stay the same in a line of releases."""
        if isinstance(self.file, LmEvalFile):
            return f"lm-eval {self.file.version}, {self.file.output_type}, {self.file.shots} shots"
        first = f"multiple choice in {self.file.format} format" if self.kind == "multiple_choice" else self.kind
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
            said = policy_sha256(self.file.model_copy(update={"items": "", "examples": ""}))
        examples = [item.model_dump() for item in self.examples[: getattr(self.file, "shots", 0)]]
        return _sha256([VERSION, self.kind, said, examples])

    def identity(self, tokenizer_sha256: str) -> str:
        """What an evaluation of this task is known by: two of the same are on the same items, measured alike."""
        return "task:" + _sha256([self.name, self.protocol, self.items_sha256, tokenizer_sha256])


def task_folder(workspace: Workspace) -> Path:
    """Where a workspace's task files lie."""
    return workspace.root / FOLDER


def task_names(folder: Path) -> list[str]:
    """Of the task files in a folder, that of lm-eval's too; a name that begins with _ is a part that others include."""
    return sorted(path.stem for path in folder.glob("*.yaml") if not path.name.startswith("_"))


def load_named(workspace: Workspace, name: str, policy: TasksPolicy) -> EvalTask:
    """Raises: TaskError when there is no such task, and as ``load_task``."""
    folder = task_folder(workspace)
    known = task_names(folder)
    if name not in known:
        there = nearest(name, known) if known else f"; {folder} holds no task file"
        raise TaskError(f"no evaluation task {name!r}{there}")
    return load_task(folder / f"{name}.yaml", policy)


def load_task(path: Path, policy: TasksPolicy) -> EvalTask:
    """Read a task file and all its items. Raises: TaskError naming the file, the record and the key."""
    if path.suffix != ".yaml" or path.name.startswith("_") or len(path.stem) > 100:
        raise TaskError(f"{path}: the file of a task is NAME.yaml, of at most 100 letters and no '_' before")
    try:
        if not _ours(path):
            file = read_lm_eval_file(path, policy.functions)
            data = [read_items(data) for data in file.data]
            records = tuple(record for one in data for record in one.records)
            _enough(path, len(records), policy)
            for one in data:
                check_records(file, one.records, str(one.path))
            return EvalTask(path.stem, path, file, tuple(one.sha256 for one in data), records=records)
        ours = parse(TaskFile, load_yaml(path), str(path), TaskError)
        items_file = read_items(beside(path, "items", ours.items))
        items = read_records(ours.kind, items_file.records, str(items_file.path))
        _enough(items_file.path, len(items), policy)
        examples: list[TaskItem] = []
        if ours.examples:
            shown = read_items(beside(path, "examples", ours.examples))
            examples = read_records(ours.kind, shown.records, str(shown.path))
            if len(examples) < ours.shots:
                raise TaskError(f"{shown.path}: {len(examples)} examples, {ours.shots} are to be shown (shots)")
            if ours.kind == "code":
                raise TaskError(f"{path}: examples: a task of kind code shows none")
        sha256 = (items_file.sha256,)
    except (ConfigError, InputError) as error:
        raise TaskError(str(error)) from error
    return EvalTask(path.stem, path, ours, sha256, tuple(items), tuple(examples), tuple(items_file.records))


def beside(path: Path, key: str, name: str) -> Path:
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
    return any(line.startswith(("kind:", '"kind":', "'kind':")) for line in lines)


def _enough(path: Path, count: int, policy: TasksPolicy) -> None:
    if count < policy.items_min:
        raise TaskError(f"{path}: {count} items, at least {policy.items_min} are needed (items_min in tasks.yaml)")


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
