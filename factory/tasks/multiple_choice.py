"""Scores multiple choice as lm-eval does: by the log-probability after the question of each choice's text (cloze) or letter (letter)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from factory.evals.tasks import EvalItem
from factory.tasks.items import LETTERS, ChoiceItem, select_examples
from factory.tasks.model import Advance, ContinuationScore
from factory.tasks.task_file import EvalTask, TaskFile


def build_prompt(file: TaskFile, item: ChoiceItem, examples: Sequence[ChoiceItem]) -> str:
    """The prompt of a question: header, examples with their answers, question."""
    known = select_examples(item, examples, file.shots)
    shown = [f"{_question(file, one)} {_choices(file, one)[one.right_choice_index]}" for one in known]
    return file.header.format(subject=item.subject) + "\n\n".join([*shown, _question(file, item)])


class ContinuationScorer(Protocol):
    """A model that scores continuations: ``TaskModel``, or a model with given scores."""

    def score_continuations(self, pairs: Sequence[tuple[str, str]], advance: Advance) -> list[ContinuationScore]: ...


def score_choices(task: EvalTask, model: ContinuationScorer, advance: Advance) -> list[EvalItem]:
    """For each item ``acc`` (1 if the right choice has the highest log-probability) and, in cloze format, ``acc_norm`` (the same per character).

    If n choices share the highest value, each counts 1/n, so that a model without a preference scores chance.
    """
    assert isinstance(task.file, TaskFile)
    pairs: list[tuple[str, str]] = []
    begins: list[int] = []
    for item in task.items:
        prompt = build_prompt(task.file, item, task.examples)
        begins.append(len(pairs))
        pairs += [(prompt, f" {choice}") for choice in _choices(task.file, item)]
    scored = model.score_continuations(pairs, advance)
    rows = []
    for item, begin in zip(task.items, begins, strict=True):
        values = np.array([one.log_probability for one in scored[begin : begin + len(item.choices)]])
        right = {"acc": _share(values, item.right_choice_index)}
        if task.file.format == "cloze":
            lengths = np.array([len(choice) for choice in item.choices])
            right["acc_norm"] = _share(values / lengths, item.right_choice_index)
        rows += [
            EvalItem(f"{task.name}/{metric}", item.key, task.name, item.cluster, share, 1.0)
            for metric, share in right.items()
        ]
    return rows


def _share(values: npt.NDArray[np.float64], right: int) -> float:
    best = values == values.max()
    return float(best[right]) / float(best.sum())


def _question(file: TaskFile, item: ChoiceItem) -> str:
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, item.choices))
    return file.template.format(question=item.question, choices=listed)


def _choices(file: TaskFile, item: ChoiceItem) -> list[str]:
    return item.choices if file.format == "cloze" else list(LETTERS[: len(item.choices)])
