"""What stands between the data that is there and a release: held-out groups, the gain that would be seen, licences, tasks, vocabulary, recipe.

The numbers are the release gate's own (``factory.gates.release.releasability``), on the gate's own suite; here they are gathered and worded.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from factory.core.errors import ConfigError, FactoryError
from factory.core.workspace import Workspace
from factory.evals.policy import EvalPolicy
from factory.evals.statistics import CLOZE
from factory.evals.suite import Suite, build_suite
from factory.evals.tasks import build_cloze
from factory.gates.release.licences import NONE, not_releasable, tokens_by_licence
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.releasability import RIGHT, DomainSize, GuardSize, Sizes, TaskSize, releasability, spreads
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.removals import NO_LICENCE
from factory.ledger.rows import EvaluationRow, SegmentRow, champion
from factory.tasks.policy import TasksPolicy
from factory.tasks.task_file import EvalTask, load_named, look_into, task_folder

NAMED = 4  # licences in a line
PLAIN = re.compile(r"[\w.+ -]+", re.ASCII)  # a licence that a shell and YAML leave as it is


@dataclass(frozen=True)
class ReleasableLine:
    """``ok``: False, it holds every release; None, a warning; True, nothing to do. ``todo``: what to do, with commands."""

    name: str  # a domain, 'gain', 'cloze', 'licences', 'recipe', or a task
    ok: bool | None
    text: str
    todo: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def look(plant: Plant) -> list[ReleasableLine]:
    """The report, what holds releases first. Empty before the first shard. Raises: ConfigError for a policy that cannot be read."""
    if not plant.ledger.read("SELECT 1 AS one FROM documents WHERE fate IN ('train', 'held_out') LIMIT 1"):
        return []
    lines = [*_held_out(plant), *_licences(plant), *_recipe(plant)]
    return sorted(lines, key=lambda line: (line.ok is not False, line.ok is not None))


def describe(lines: list[ReleasableLine]) -> list[str]:
    """For a person: a line each, with its remedy below."""
    said = []
    for line in lines:
        mark = {True: "✓", None: "–", False: "✗"}[line.ok]
        said.append(f"{mark} {line.name}: {line.text}")
        said += [f"    to do: {line.todo}"] if line.todo else []
    return said


def verdict(lines: list[ReleasableLine]) -> str:
    """One line: what holds releases."""
    holding = [line.name for line in lines if line.ok is False]
    return f"releases would be held: {', '.join(holding)}" if holding else "nothing would hold a release"


def _held_out(plant: Plant) -> Iterator[ReleasableLine]:
    try:
        tokenizer = Tokenizer.load(plant.workspace.tokenizer)
    except FactoryError:
        return  # the first shard has not been made yet
    policy, measured = (
        ReleasePolicy.load(plant.workspace.policy("gates/release.yaml")),
        EvalPolicy.load(plant.workspace.policy("evals.yaml")),
    )
    suite = build_suite(plant.ledger, measured, tokenizer.sha256)
    known = spreads(plant.ledger)
    trained = {
        row["domain"]: row["documents"]
        for row in plant.ledger.read(
            "SELECT domain, COUNT(*) AS documents FROM documents WHERE fate = 'train' GROUP BY domain"
        )
    }
    domains = {name: _domain(suite, name, known.get(name)) for name in sorted({*trained, *suite.domains})}
    tasks, wrong = _tasks(plant.workspace)
    files = look_into(task_folder(plant.workspace)).tasks
    chosen = TasksPolicy.load(plant.workspace.policy("tasks.yaml"))
    newest = champion(plant.ledger)
    right = _cloze_right(plant.ledger, newest.candidate) if newest else None
    sizes = Sizes(
        {name: one for name, one in domains.items() if one.documents},
        cloze_items=len(build_cloze(suite, tokenizer, measured)),
        cloze_right=RIGHT if right is None else right,
        tasks={name: _size(task, margin) for name, (task, margin) in tasks.items()},
        tasks_alpha=chosen.guards_alpha,
    )
    found = releasability(policy, sizes)
    guards = {guard.name: guard for guard in found.guards}
    for name, domain in domains.items():
        yield _domain_line(policy, name, domain, guards.get(name), trained.get(name, 0))
    if CLOZE in guards:
        yield _small(guards[CLOZE], CLOZE, "bring more documents: its questions are made from the held-out ones")
    for name in tasks:
        yield _small(guards[name], f"task {name}", _larger(chosen, guards[name]))
    for name, why in wrong.items():
        yield ReleasableLine(
            f"task {name}",
            False,
            why,
            f"'factory tasks check {shlex.quote(str(files[name]))}' checks it again; or take the file away",
        )
    if found.gain is not None:
        of = "measured" if known else "assumed"
        text = f"a gain of {found.gain:.3f} bits per byte in every domain would be shown 80 times in 100 (by the {of} spread between groups)"
        yield ReleasableLine("gain", True, text)


def _domain(suite: Suite, name: str, spread: float | None) -> DomainSize:
    sealed = suite.of(name)
    dev = {document.cluster for document in suite.dev if document.domain == name}
    return DomainSize(len(sealed), len({document.cluster for document in sealed}), len(dev), spread)


def _domain_line(
    policy: ReleasePolicy, name: str, have: DomainSize, guard: GuardSize | None, trained: int
) -> ReleasableLine:
    halves = f"{have.groups} document groups in the sealed half and {have.dev_groups} in the dev half"
    if guard is not None and guard.state != "missing":
        more = guard.needed is not None and guard.needed > have.groups
        text = f"{halves}; the gate needs {policy.clusters_min}"
        if not more:
            return ReleasableLine(name, True, text)
        advice = (
            f"it passes {guard.passed:.0%} of equally good models, and would pass 80% with about {guard.needed} groups"
        )
        return ReleasableLine(
            name, None, f"{text}; {advice}", f"bring more documents of {name}; each shard holds some out"
        )
    needed = f"{policy.documents_min} documents of {policy.clusters_min} groups"
    text = f"{have.documents} held-out documents of {halves}; the gate needs {needed}"
    if have.documents + trained >= 4 * policy.clusters_min:
        regroup = f"'factory data relabel --domain {name} --group document'"
        todo = f"bring documents of other groups; or, if documents do not quote one another, {regroup}"
    else:
        todo = f"bring more documents of {name}, or name another domain for them: 'factory data relabel --domain {name} --to-domain OTHER'"
    return ReleasableLine(name, False, text, todo)


def _small(guard: GuardSize, name: str, todo: str) -> ReleasableLine:
    if guard.state == "stands":
        return ReleasableLine(name, True, f"guards with {guard.have} items")
    size = f"about {guard.needed} items are needed" if guard.needed else "no number of items is enough for its margin"
    text = f"informs, does not guard: its {guard.have} items pass {guard.passed:.0%} of equally good models, a guard must pass 80%; {size}"
    return ReleasableLine(name, None, text, todo)


def _larger(policy: TasksPolicy, guard: GuardSize) -> str:
    """What makes a task a guard."""
    if guard.margin is None:
        return "add items to it"
    command = policy.setting(guard.name, "margin", guard.margin)
    how = f"'{command}'" if command else "its margin in tasks.yaml"
    return f"add items to it, or have it guard against a loss of more than {guard.margin:.2f}: {how}"


def _tasks(workspace: Workspace) -> tuple[dict[str, tuple[EvalTask, float]], dict[str, str]]:
    """({task: (itself, margin)}, {task: what is wrong with it}) of those that are ever measured."""
    policy = TasksPolicy.load(workspace.policy("tasks.yaml"))
    found: dict[str, tuple[EvalTask, float]] = {}
    wrong: dict[str, str] = {}
    for name in look_into(task_folder(workspace)).tasks:
        if policy.of(name).tier == "never":
            continue
        try:
            found[name] = load_named(workspace, name, policy), policy.of(name).margin
        except FactoryError as error:
            wrong[name] = str(error)
    return found, wrong


def _size(task: EvalTask, margin: float) -> TaskSize:
    items = len(task.items or task.records)
    return TaskSize(
        items, len({getattr(item, "source", None) or n for n, item in enumerate(task.items)}) or items, margin
    )


def _cloze_right(ledger: Ledger, candidate: int) -> float | None:
    for row in EvaluationRow.select(
        ledger,
        "WHERE candidate = :candidate AND suite_sha256 NOT LIKE 'task:%' ORDER BY id DESC LIMIT 1",
        candidate=candidate,
    ):
        right = (row.summary.get("cloze") or {}).get("share_right")
        return right if isinstance(right, float) else None
    return None


def _licences(plant: Plant) -> Iterator[ReleasableLine]:
    from factory.training.planning import last_segment

    policy, data = (
        ReleasePolicy.load(plant.workspace.policy("gates/release.yaml")),
        DataPolicy.load(plant.workspace.policy("data.yaml")),
    )
    tokens = tokens_by_licence(plant.ledger, None, data.licences)
    other = not_releasable(data.licences, tokens)
    share = sum(other.values())
    if share <= policy.not_releasable_max:
        trunk = last_segment(plant.ledger, "trunk")
        lineage = [row.id for row in SegmentRow.lineage(plant.ledger, trunk.id)] if trunk else []
        shares = {
            number: sum(not_releasable(data.licences, tokens_by_licence(plant.ledger, number, data.licences)).values())
            for number in lineage
        }
        if spoilt := [number for number, part in shares.items() if part > policy.not_releasable_max]:
            text = f"{shares[spoilt[-1]]:.1%} of what the trunk was trained on may not be released, though later segments are free of it"
            todo = (
                f"'factory rewind {spoilt[0]}': the trunk is trained again without it, from before segment {spoilt[0]}"
            )
            yield ReleasableLine("licences", False, text, todo)
            return
        yield ReleasableLine(
            "licences",
            True,
            "all of the data may be released"
            if not share
            else f"{share:.1%} may not be released, and at most {policy.not_releasable_max:.1%} is accepted",
        )
        return
    named = ", ".join(f"{name} {part:.1%}" for name, part in list(other.items())[:NAMED])
    first = next(iter(other))
    take_out = f"'factory data remove --license \"{first}\"'"
    if first == NONE:
        todo = "if they are yours, 'factory config set data licences.missing \"{train: true, release: true}\"'"
        take_out = f"'factory data remove --license {NO_LICENCE}'"
    elif not PLAIN.fullmatch(first):  # what a file says it is: no part of a command that a person pastes
        todo, take_out = (
            f"if {first!r} allows it, list it under licences.known in data.yaml",
            "take these documents out",
        )
    else:
        listed = f"'factory config set data licences.known \"{{{first}: {{train: true, release: true}}}}\"'"
        todo = f"if {first} allows it, {listed}; if the name is wrong, "
        own = plant.ledger.read(
            "SELECT 1 AS one FROM documents WHERE fate = 'train' AND license = :name LIMIT 1", name=first
        )
        right = f"'factory data relabel --license \"{first}\" --to-license NAME'"
        todo += (
            right
            if own
            else "'factory data claims' lists the texts that came under another licence too, and how to settle it"
        )
    text = (
        f"{share:.1%} of the tokens are from documents whose licence does not allow the release of a model: {named}; "
        f"at most {policy.not_releasable_max:.1%} is accepted"
    )
    yield ReleasableLine("licences", False, text, f"{todo}; else {take_out}")


def _recipe(plant: Plant) -> Iterator[ReleasableLine]:
    from factory.training.planning import last_segment, refuse_misfit
    from trainer.contract.errors import TrainerError
    from trainer.contract.recipe import Recipe

    try:
        recipe = Recipe.load(plant.workspace.recipe_path())
        refuse_misfit(plant, recipe, last_segment(plant.ledger, "trunk"))
    except (ConfigError, TrainerError) as error:
        yield ReleasableLine("recipe", False, str(error))
        return
    yield ReleasableLine("recipe", True, f"{recipe.name}: fits the vocabulary of {recipe.model.vocab_size:,}")
