"""Proves a task before it is used: the scorer that measures models must give right answers 1, and empty answers 0 or chance.

A task is proven once for its protocol and items, by ``factory tasks check`` or before its first measurement. An event records the proof.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from factory.core.progress import Progress
from factory.ledger.ledger import Ledger, record_event
from factory.tasks.exact_answer import extract_answer, is_same_answer
from factory.tasks.items import ChoiceItem, CodeItem, MathsItem, TaskError, make_empty_tests_message
from factory.tasks.libraries import refuse_missing_libraries
from factory.tasks.model import Advance, ContinuationScore
from factory.tasks.multiple_choice import score_choices
from factory.tasks.policy import TaskLimits, TasksPolicy
from factory.tasks.program_texts import EMPTY_CLASS, EMPTY_REPLIES, RAISE
from factory.tasks.task_file import EvalTask, TaskFile
from factory.tasks.verifiers import check_maths_answers, check_programs, check_solutions
from kernels.contract.message import Message

EVENT = "task_proven"


@dataclass(frozen=True)
class TaskProof:
    """The scores that prove a task. The scorer that measures models computes them; each is a share of all items."""

    gold: float | None = None  # of the right answers; None: the task has none that can be scored
    empty: float | None = None  # of replies and programs without an answer
    chance: float | None = None  # of a model that gives all choices the same probability
    blind: dict[str, float] = field(default_factory=dict)  # by rule: of answers that ignore the question
    without_solution: int = 0  # code items without a solution to run their tests on

    def describe(self) -> list[Message]:
        """The findings, each a part of a sentence."""
        said = []
        if self.gold is not None:
            said.append(Message("proving.gold", "right answers get the score {score:g}", score=self.gold))
        if self.empty is not None:
            said.append(Message("proving.empty", "empty answers get the score {score:g}", score=self.empty))
        if self.chance is not None:
            said.append(
                Message(
                    "proving.chance",
                    "a model that gives all choices the same probability gets the score {score:.3f}",
                    score=self.chance,
                )
            )
        said += [
            Message("proving.blind", "the rule '{rule}' gets the score {score:.3f}", rule=rule, score=score)
            for rule, score in self.blind.items()
        ]
        if self.without_solution:
            said.append(
                Message(
                    "proving.without_solution", "the tests of {items:,|item|items} were not tried, because these items have no solution to try",
                    items=self.without_solution,
                )
            )  # fmt: skip
        return said


def prove_task(ledger: Ledger, task: EvalTask, policy: TasksPolicy, progress: Progress) -> TaskProof:
    """Prove a task and record the proof.

    Raises: TaskError naming the item that fails and how; IsolationError if programs or formulas need a sandbox and there is none.
    """
    prover: dict[str, Callable[[], TaskProof]] = {
        "multiple_choice": lambda: _choices(task),
        "maths": lambda: _maths(task.items, policy.running),
        "code": lambda: _code(task.items, policy.running, progress, task.name),
    }
    found = prover[task.kind]() if task.kind in prover else TaskProof()
    with ledger.begin() as tx:
        record_event(tx, EVENT, f"task:{task.name}", {**_what(task), **asdict(found)})
    return found


def is_proven(ledger: Ledger, task: EvalTask) -> bool:
    """Was the task proven with its present protocol and items?"""
    known = ledger.read(
        "SELECT detail FROM events WHERE kind = :kind AND subject = :subject ORDER BY id DESC LIMIT 1",
        kind=EVENT,
        subject=f"task:{task.name}",
    )
    what = _what(task)
    return bool(known) and {key: known[0]["detail"].get(key) for key in what} == what


def _what(task: EvalTask) -> dict[str, Any]:
    return {"protocol": task.protocol_sha256, "items": list(task.items_sha256)}


# -- multiple choice ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Said:
    """A model that returns given log-probabilities, in order."""

    values: Sequence[float]

    def score_continuations(self, pairs: Sequence[tuple[str, str]], advance: Advance) -> list[ContinuationScore]:
        assert len(pairs) == len(self.values)
        return [ContinuationScore(value, False) for value in self.values]


def _choices(task: EvalTask) -> TaskProof:
    assert isinstance(task.file, TaskFile)
    items: tuple[ChoiceItem, ...] = task.items
    scored = lambda values: score_choices(task, _Said(values), lambda n: None)
    for row in scored(
        [0.0 if at == item.right_choice_index else -1e6 for item in items for at in range(len(item.choices))]
    ):
        if row.value != 1:
            raise TaskError(
                "proving.right_choice",
                "item {item!r}: if the right choice is by far the likeliest, metric {metric} must be 1, but it is {score:g}",
                item=row.item, score=row.value, metric=row.task,
            )  # fmt: skip
    chance = sum(1 / len(item.choices) for item in items) / len(items)
    ties = {
        "acc": [-1.0 for item in items for _ in item.choices],
        "acc_norm": [-float(len(choice)) for item in items for choice in item.choices],
    }
    for metric, values in ties.items():
        mine = [row.value for row in scored(values) if row.task.endswith(f"/{metric}")]
        if mine and abs(sum(mine) / len(mine) - chance) > 1e-9:
            raise TaskError(
                "proving.not_chance",
                "A model that gives all choices the same probability scores {score:.3f} on {metric}, but a random "
                "choice would score {chance:.3f}",
                score=sum(mine) / len(mine), metric=metric, chance=chance,
            )  # fmt: skip
    places = Counter(item.right_choice_index for item in items)
    lengths = [[len(choice) for choice in item.choices] for item in items]
    place, most = places.most_common(1)[0]
    blind = {
        "always the first": places[0] / len(items),
        "always the longest": _share(lengths, items, max),
        "always the shortest": _share(lengths, items, min),
    }
    if task.file.format == "letter" and most == len(items):
        raise TaskError(
            "proving.same_place",
            "All {items:,} right choices are at place {place}, so a model that always names this place scores 1. Shuffle the choices of each item",
            items=most, place=place,
        )  # fmt: skip
    for rule in ("always the longest", "always the shortest"):
        if blind[rule] == 1:
            raise TaskError(
                "proving.length_tells", "The rule '{rule}' finds the right choice in all {items:,} items, so the length reveals the answer",
                rule=rule, items=len(items),
            )  # fmt: skip
    return TaskProof(1.0, None, chance, blind)


def _share(lengths: list[list[int]], items: Sequence[ChoiceItem], which: Callable[[list[int]], int]) -> float:
    """The share of items whose right choice has the extreme length. If n choices share that length, an item counts 1/n."""
    return sum(
        (mine[item.right_choice_index] == which(mine)) / mine.count(which(mine))
        for mine, item in zip(lengths, items, strict=True)
    ) / len(items)


# -- maths -------------------------------------------------------------------------------------------------------------
def _maths(items: Sequence[MathsItem], running: TaskLimits) -> TaskProof:
    golds = [extract_answer(str(item.answer)) or str(item.answer) for item in items]
    ways = [(str(item.answer), f"#### {gold}", f"\\boxed{{{gold}}}") for item, gold in zip(items, golds, strict=True)]
    asked = [(item, reply) for item, replies in zip(items, ways, strict=True) for reply in replies]
    for (item, reply), found in zip(asked, check_maths_answers(asked, running), strict=True):
        if not found.right:
            raise TaskError(
                "proving.own_answer",
                "item {item!r}: the reply {reply!r} has the right answer, but counts as wrong. Write the answer as a number or a short expression",
                item=item.key, reply=reply[-80:],
            )  # fmt: skip
    nothing = [(item, reply) for item in items for reply in EMPTY_REPLIES]
    for (item, reply), found in zip(nothing, check_maths_answers(nothing, running), strict=True):
        if found.right:
            raise TaskError(
                "proving.empty_reply",
                "item {item!r}: the reply {reply!r} has no answer, but counts as right",
                item=item.key,
                reply=reply,
            )
    same = [sum(is_same_answer(other, gold) for other in golds) for gold in dict.fromkeys(golds)]
    often = list(dict.fromkeys(golds))[same.index(max(same))]
    if max(same) == len(items):
        raise TaskError(
            "proving.same_answer", "All {items:,} items have the answer {answer!r}, so a model that always gives this answer scores 1",
            items=len(items), answer=often[:40],
        )  # fmt: skip
    return TaskProof(1.0, 0.0, None, {f"always {often[:40]!r}": max(same) / len(items)})


# -- code --------------------------------------------------------------------------------------------------------------
def _code(items: Sequence[CodeItem], running: TaskLimits, progress: Progress, name: str) -> TaskProof:
    refuse_missing_libraries(items, running)
    empty = [(item, how, program) for item in items for how, program in make_programs_without_answer(item)]
    mine = sum(item.solution is not None for item in items)
    with progress.task(f"proving {name}", len(empty) + mine) as bar:
        check_solutions(items, running, bar.advance)
        found = check_programs([(program, item.tests) for item, _, program in empty], running, bar.advance)
    for (item, how, _), one in zip(empty, found, strict=True):
        if one.right:
            raise TaskError(
                "proving.empty_program",
                "item {item!r}: {problem}. For example, a program that {program} passes. The tests must call 'check' or unittest.main()",
                item=item.key, problem=make_empty_tests_message(), program=how,
            )  # fmt: skip
    return TaskProof(1.0 if mine == len(items) else None, 0.0, without_solution=len(items) - mine)


def make_programs_without_answer(item: CodeItem) -> Iterator[tuple[str, str]]:
    """(description, program) of programs without an answer: no text, nothing after the prompt, functions that return None or raise.

    >>> dict(make_programs_without_answer(CodeItem(id=1, prompt="def f(x):\\n", tests="assert f(1) == 2",
    ...     solution="    return x + 1\\n")))["returns None"]
    'def f(x):\\n    return None\\n'
    """
    found = {"": "is empty", item.make_program_of_reply(""): "ends with its prompt"}
    for how, statement in (("returns None", "return None"), ("raises", RAISE)):
        found.setdefault(_body(item, statement), how)
    for program, how in found.items():
        yield how, program


def _body(item: CodeItem, statement: str) -> str:
    """A program whose functions have only ``statement`` as body: all functions of the solution, or the prompt's last function."""
    begun = item.make_program_of_reply("")
    if not begun.strip():
        return "".join(_stub(name, kind, statement) for name, kind in _defined(item.solution or ""))
    lines = [line for line in (item.solution or "").splitlines() if line.strip()]
    indent = re.match(r"[ \t]*", lines[0])[0] if lines else ""  # type: ignore[index]
    if not indent:
        opened = re.findall(r"^([ \t]*)(?:async\s+)?def\s", begun, re.MULTILINE)
        indent = f"{opened[-1]}    " if opened else ""
    return f"{begun.rstrip(' ')}{'' if begun.endswith((chr(10), ' ')) else chr(10)}{indent}{statement}\n"


def _defined(program: str) -> list[tuple[str, type]]:
    try:
        body = ast.parse(textwrap.dedent(program)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [
        (one.name, type(one)) for one in body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]


def _stub(name: str, kind: type, statement: str) -> str:
    if kind is ast.ClassDef:
        return EMPTY_CLASS.format(name=name)
    return f"{'async ' * (kind is ast.AsyncFunctionDef)}def {name}(*args, **keys):\n    {statement}\n"
