"""Generates answers, verifies them, and computes each item's pass@k."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from typing import Any

from factory.evals.tasks import EvalItem
from factory.tasks.items import CodeItem, MathsItem, select_examples
from factory.tasks.model import Advance, GenerationParameters, TaskModel
from factory.tasks.policy import TaskLimits
from factory.tasks.reply import cut_after_first_answer
from factory.tasks.task_file import EvalTask, TaskFile
from factory.tasks.verifiers import AnswerCheckResult, check_maths_answers, check_programs

SHOWN = 5  # answers in the summary
SHOWN_LETTERS = 500


def estimate_pass_at_k(samples: int, right: int, k: int) -> float:
    """The unbiased estimate that one of ``k`` answers is right: 1 − C(n − c, k) / C(n, k) (Chen et al. 2021, eq. 1).

    >>> estimate_pass_at_k(10, 3, 1), round(estimate_pass_at_k(10, 3, 5), 4), estimate_pass_at_k(10, 0, 5), estimate_pass_at_k(10, 6, 5)
    (0.3, 0.9167, 0.0, 1.0)
    """
    assert 0 <= right <= samples and 1 <= k <= samples
    return float(1 - math.comb(samples - right, k) / math.comb(samples, k)) if k > 1 else right / samples


def generate_and_check(
    task: EvalTask, model: TaskModel, limits: TaskLimits, advance: Advance
) -> tuple[list[EvalItem], dict[str, Any]]:
    """Return (an item for each question and each k of pass@k, counts and examples of the answers)."""
    file = task.file
    assert isinstance(file, TaskFile)
    prompts = [_prompt(file, item, task) for item in task.items]
    how = GenerationParameters(file.max_tokens, file.stop_texts, file.temperature)
    asked = [(item, prompt, number) for item, prompt in zip(task.items, prompts) for number in range(file.samples)]
    seeds = [hash_to_seed(file.seed, task.name, item.key, number) for item, _, number in asked]
    drawn = model.generate([prompt for _, prompt, _ in asked], how, seeds, advance)
    if task.kind == "code":
        programs = [
            (item.make_program_of_reply(one.text), item.tests) for (item, _, _), one in zip(asked, drawn, strict=True)
        ]
        checked = check_programs(programs, limits)
    else:
        texts = [cut_after_first_answer(one.text, file.template) for one in drawn]
        checked = check_maths_answers([(item, text) for (item, _, _), text in zip(asked, texts, strict=True)], limits)
    right: Counter[str] = Counter()
    for (item, _, _), found in zip(asked, checked, strict=True):
        right[item.key] += found.right
    rows = [
        EvalItem(
            f"{task.name}/pass@{k}",
            item.key,
            task.name,
            item.cluster,
            estimate_pass_at_k(file.samples, right[item.key], k),
            1.0,
        )
        for item in task.items
        for k in sorted(set(file.pass_at))
    ]
    said = {
        "answers": len(drawn),
        "right": right.total(),
        "never_ended": sum(not one.ended for one in drawn),
        "stopped": dict(sorted(Counter(found.stopped for found in checked if found.stopped).items())),
        "samples": [
            {"item": item.key, "answer": one.text[:SHOWN_LETTERS], "ended": one.ended} | _shown(found)
            for (item, _, _), one, found in list(zip(asked, drawn, checked))[:SHOWN]
        ],
    }
    return rows, said


def _prompt(file: TaskFile, item: CodeItem | MathsItem, task: EvalTask) -> str:
    examples = select_examples(item, task.examples, file.shots)
    if isinstance(item, CodeItem):
        return "\n\n".join([*(one.prompt + (one.solution or "") for one in examples), item.prompt])
    shown = [f"{file.template.format(question=one.question)} {one.answer}" for one in examples]
    return file.header.format(subject=item.subject) + "\n\n".join(
        [*shown, file.template.format(question=item.question)]
    )


def hash_to_seed(*parts: object) -> int:
    """A 56-bit seed: a hash of ``parts``."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


def _shown(found: AnswerCheckResult) -> dict[str, Any]:
    return {"right": found.right, "why": found.stopped or found.why}
