"""Proves a task before it counts: what is right scores 1, what says nothing scores chance or 0, all through the scorer that measures models.

A task is proven once for its protocol and items, by ``factory tasks check`` or before it is first measured; an event says so.
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
from factory.ledger.ledger import Ledger, record
from factory.tasks.exact_answer import answer_of, same_answer
from factory.tasks.items import ChoiceItem, CodeItem, MathsItem, TaskError
from factory.tasks.libraries import refuse_missing_libraries
from factory.tasks.model import Advance, Scored
from factory.tasks.multiple_choice import choose
from factory.tasks.policy import TaskLimits, TasksPolicy
from factory.tasks.task_file import EvalTask, TaskFile
from factory.tasks.verifiers import check_maths, check_programs, check_solutions

EVENT = "task_proven"
# What says nothing: the score of each must be 0.
EMPTY_REPLIES = ("", "I do not know.", "no answer", "?", "The answer is", "lorem ipsum dolor sit amet")


@dataclass(frozen=True)
class Proof:
    """What was found of a task, each by the scorer that measures models. The scores of a metric are shares of all items."""

    gold: float | None = None  # of the right answers; None: nothing to prove it by
    empty: float | None = None  # of replies, programs that say nothing
    chance: float | None = None  # of a model to which all choices are the same
    blind: dict[str, float] = field(default_factory=dict)  # by rule, of answers that do not look at the question
    without_solution: int = 0  # code items whose tests nothing is known to pass

    def words(self) -> list[str]:
        """Of each finding, a sentence's part."""
        said = []
        if self.gold is not None:
            said.append(f"right answers score {self.gold:g}")
        if self.empty is not None:
            said.append(f"empty ones {self.empty:g}")
        if self.chance is not None:
            said.append(f"a model that tells no choice apart {self.chance:.3f}")
        said += [f"{rule} {score:.3f}" for rule, score in self.blind.items()]
        if self.without_solution:
            said.append(f"{self.without_solution} items have no solution, so nothing is known to pass their tests")
        return said


def prove(ledger: Ledger, task: EvalTask, policy: TasksPolicy, progress: Progress) -> Proof:
    """Prove a task and record that it is. Raises: TaskError naming the item that fails, and how; IsolationError where
    programs or formulas are to be run and there is no sandbox."""
    prover: dict[str, Callable[[], Proof]] = {
        "multiple_choice": lambda: _choices(task),
        "maths": lambda: _maths(task.items, policy.running),
        "code": lambda: _code(task.items, policy.running, progress, task.name),
    }
    found = prover[task.kind]() if task.kind in prover else Proof()
    with ledger.begin() as tx:
        record(tx, EVENT, f"task:{task.name}", {**_what(task), **asdict(found)})
    return found


def is_proven(ledger: Ledger, task: EvalTask) -> bool:
    """Was the task proven with these items, as its file says now?"""
    known = ledger.read(
        "SELECT detail FROM events WHERE kind = :kind AND subject = :subject ORDER BY id DESC LIMIT 1",
        kind=EVENT,
        subject=f"task:{task.name}",
    )
    what = _what(task)
    return bool(known) and {key: known[0]["detail"].get(key) for key in what} == what


def _what(task: EvalTask) -> dict[str, Any]:
    return {"protocol": task.protocol, "items": list(task.items_sha256)}


# -- multiple choice ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Said:
    """A model whose log-probabilities are said beforehand, in the order in which they are asked for."""

    values: Sequence[float]

    def log_probabilities(self, pairs: Sequence[tuple[str, str]], advance: Advance) -> list[Scored]:
        assert len(pairs) == len(self.values)
        return [Scored(value, False) for value in self.values]


def _choices(task: EvalTask) -> Proof:
    assert isinstance(task.file, TaskFile)
    items: tuple[ChoiceItem, ...] = task.items
    scored = lambda values: choose(task, _Said(values), lambda n: None)
    for row in scored([0.0 if at == item.right else -1e6 for item in items for at in range(len(item.choices))]):
        if row.value != 1:
            raise TaskError(
                f"item {row.item!r}: its right choice scores {row.value:g} on {row.task}, though it is the likeliest by far"
            )
    chance = sum(1 / len(item.choices) for item in items) / len(items)
    ties = {
        "acc": [-1.0 for item in items for _ in item.choices],
        "acc_norm": [-float(len(choice)) for item in items for choice in item.choices],
    }
    for metric, values in ties.items():
        mine = [row.value for row in scored(values) if row.task.endswith(f"/{metric}")]
        if mine and abs(sum(mine) / len(mine) - chance) > 1e-9:
            raise TaskError(
                f"a model that tells no choice apart scores {sum(mine) / len(mine):.3f} on {metric}, chance is {chance:.3f}"
            )
    places = Counter(item.right for item in items)
    lengths = [[len(choice) for choice in item.choices] for item in items]
    place, most = places.most_common(1)[0]
    blind = {
        "always the first": places[0] / len(items),
        "always the longest": _share(lengths, items, max),
        "always the shortest": _share(lengths, items, min),
    }
    if task.file.format == "letter" and most == len(items):
        raise TaskError(
            f"all {most} right choices stand at place {place}: a model that always says so scores 1; shuffle the choices of each item"
        )
    for rule in ("always the longest", "always the shortest"):
        if blind[rule] == 1:
            raise TaskError(f"{rule} choice is right in each of {len(items)} items: length alone tells the answers")
    return Proof(1.0, None, chance, blind)


def _share(lengths: list[list[int]], items: Sequence[ChoiceItem], which: Callable[[list[int]], int]) -> float:
    """Of the items whose right choice alone has the extreme length; of several each has its part."""
    return sum(
        (mine[item.right] == which(mine)) / mine.count(which(mine)) for mine, item in zip(lengths, items, strict=True)
    ) / len(items)


# -- maths -------------------------------------------------------------------------------------------------------------
def _maths(items: Sequence[MathsItem], running: TaskLimits) -> Proof:
    golds = [answer_of(str(item.answer)) or str(item.answer) for item in items]
    ways = [(str(item.answer), f"#### {gold}", f"\\boxed{{{gold}}}") for item, gold in zip(items, golds, strict=True)]
    asked = [(item, reply) for item, replies in zip(items, ways, strict=True) for reply in replies]
    for (item, reply), found in zip(asked, check_maths(asked, running), strict=True):
        if not found.right:
            raise TaskError(
                f"item {item.key!r}: its own answer is wrong when a model replies {reply[-80:]!r}: write it as a number or a short expression"
            )
    nothing = [(item, reply) for item in items for reply in EMPTY_REPLIES]
    for (item, reply), found in zip(nothing, check_maths(nothing, running), strict=True):
        if found.right:
            raise TaskError(f"item {item.key!r}: the reply {reply!r} is right, which says nothing")
    same = [sum(same_answer(other, gold) for other in golds) for gold in dict.fromkeys(golds)]
    often = list(dict.fromkeys(golds))[same.index(max(same))]
    if max(same) == len(items):
        raise TaskError(f"all {len(items)} items have the answer {often[:40]!r}: a model that always says so scores 1")
    return Proof(1.0, 0.0, None, {f"always {often[:40]!r}": max(same) / len(items)})


# -- code --------------------------------------------------------------------------------------------------------------
def _code(items: Sequence[CodeItem], running: TaskLimits, progress: Progress, name: str) -> Proof:
    refuse_missing_libraries(items, running)
    empty = [(item, how, program) for item in items for how, program in empty_programs(item)]
    mine = sum(item.solution is not None for item in items)
    with progress.task(f"proving {name}", len(empty) + mine) as bar:
        check_solutions(items, running, bar.advance)
        found = check_programs([(program, item.tests) for item, _, program in empty], running, bar.advance)
    for (item, how, _), one in zip(empty, found, strict=True):
        if one.right:
            raise TaskError(
                f"item {item.key!r}: its tests test nothing: a program that {how} passes them. A function 'check' must be called, and a TestCase run "
                "by unittest.main()"
            )
    return Proof(1.0 if mine == len(items) else None, 0.0, without_solution=len(items) - mine)


def empty_programs(item: CodeItem) -> Iterator[tuple[str, str]]:
    """(what it does, the program) of programs that do nothing: no text at all; nothing after the prompt; functions that return None or raise.

    >>> dict(empty_programs(CodeItem(id=1, prompt="def f(x):\\n", tests="assert f(1) == 2", solution="    return x + 1\\n")))["returns None"]
    'def f(x):\\n    return None\\n'
    """
    found = {"": "is empty", item.program(""): "ends with its prompt"}
    for how, statement in (("returns None", "return None"), ("raises", "raise RuntimeError('it is not written')")):
        found.setdefault(_body(item, statement), how)
    for program, how in found.items():
        yield how, program


def _body(item: CodeItem, statement: str) -> str:
    """The program in which each function of the solution, or the last one of the prompt, is one statement."""
    begun = item.program("")
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
        return f"class {name}:\n    def __init__(self, *args, **keys): pass\n    def __getattr__(self, name): return lambda *args, **keys: None\n"
    return f"{'async ' * (kind is ast.AsyncFunctionDef)}def {name}(*args, **keys):\n    {statement}\n"
