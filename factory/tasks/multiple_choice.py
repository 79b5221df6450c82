"""Multiple choice, as lm-eval scores it: by the log-probability of each choice's text (cloze) or of its letter (letter) after the question."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from factory.evals.tasks import EvalItem
from factory.tasks.items import LETTERS, ChoiceItem, examples_for
from factory.tasks.model import Advance, TaskModel
from factory.tasks.task_file import EvalTask, TaskFile


def prompt_of(file: TaskFile, item: ChoiceItem, examples: Sequence[ChoiceItem]) -> str:
    """The question as it is asked, after the examples with their answers."""
    known = examples_for(item, examples, file.shots)
    shown = [f"{_question(file, one)} {_choices(file, one)[one.right]}" for one in known]
    return file.header.format(subject=item.subject) + "\n\n".join([*shown, _question(file, item)])


def choose(task: EvalTask, model: TaskModel, advance: Advance) -> list[EvalItem]:
    """Per item ``acc`` (1: the right choice has the highest log-probability) and, in cloze format, ``acc_norm`` (… per character)."""
    assert isinstance(task.file, TaskFile)
    pairs: list[tuple[str, str]] = []
    begins: list[int] = []
    for item in task.items:
        prompt = prompt_of(task.file, item, task.examples)
        begins.append(len(pairs))
        pairs += [(prompt, f" {choice}") for choice in _choices(task.file, item)]
    scored = model.log_probabilities(pairs, advance)
    rows = []
    for item, begin in zip(task.items, begins, strict=True):
        values = np.array([one.log_probability for one in scored[begin : begin + len(item.choices)]])
        right = {"acc": values.argmax() == item.right}
        if task.file.format == "cloze":
            lengths = np.array([len(choice) for choice in item.choices])
            right["acc_norm"] = (values / lengths).argmax() == item.right
        rows += [
            EvalItem(f"{task.name}/{metric}", item.key, task.name, item.cluster, float(is_right), 1.0)
            for metric, is_right in right.items()
        ]
    return rows


def _question(file: TaskFile, item: ChoiceItem) -> str:
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, item.choices))
    return file.template.format(question=item.question, choices=listed)


def _choices(file: TaskFile, item: ChoiceItem) -> list[str]:
    return item.choices if file.format == "cloze" else list(LETTERS[: len(item.choices)])
