"""Makes the releasability report: held-out groups, the smallest gain that the gate would detect, licences, tasks, vocabulary and recipe.

``factory.gates.release.releasability`` computes the numbers on the release gate's own suite. This module reads the input for it and writes the lines.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from factory.core.errors import ConfigError, FactoryError
from factory.core.workspace import Workspace
from factory.evals.policy import EvalPolicy
from factory.evals.statistics import CLOZE
from factory.evals.suite import Suite, build_suite
from factory.evals.tasks import build_cloze_items
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.releasability import (
    RIGHT,
    DomainSize,
    GuardRequirement,
    SuiteSizes,
    TaskSize,
    compute_releasability,
    read_group_spreads_by_domain,
)
from factory.gates.release.trained_licences import NONE, compute_unreleasable_shares, count_tokens_by_licence
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.imported_model import find_imported_licence
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.removals import NO_LICENCE
from factory.ledger.rows import EvaluationRow, SegmentRow, find_champion
from factory.tasks.policy import TasksPolicy
from factory.tasks.task_file import EvalTask, list_tasks, load_task_by_name, task_folder
from kernels.contract.message import Message, messages_to_json

NAMED = 4  # a line names at most this many licences
PLAIN = re.compile(r"[\w.+ -]+", re.ASCII)  # a licence that is safe inside quotes in a shell and in YAML


@dataclass(frozen=True)
class ReportLine:
    """A line of the report.

    ``ok``: False if the line's problem holds back every release, None for a warning, True if there is no problem. ``todo``: the advice.
    """

    name: str  # a domain, 'gain', 'cloze', 'licences', 'recipe', or a task
    ok: bool | None
    text: str
    todo: str = ""

    def to_json(self) -> dict[str, Any]:
        return {name: messages_to_json(value) for name, value in vars(self).items()}


def make_report(plant: Plant) -> list[ReportLine]:
    """Make the report. Lines that hold back releases come first. Before the first shard, only the licence of an imported model is known.

    Raises: ConfigError for an unreadable policy.
    """
    if not plant.ledger.read("SELECT 1 AS one FROM documents WHERE fate IN ('train', 'held_out') LIMIT 1"):
        return [*_imported_licence(plant)]
    lines = [*_held_out(plant), *_imported_licence(plant), *_licences(plant), *_recipe(plant)]
    return sorted(lines, key=lambda line: (line.ok is not False, line.ok is not None))


def format_report(lines: list[ReportLine]) -> list[str]:
    """Format the report as text. The advice for a line stands below the line."""
    said = []
    for line in lines:
        mark = {True: "✓", None: "–", False: "✗"}[line.ok]
        said.append(f"{mark} {line.name}: {line.text}")
        said += [f"    to do: {line.todo}"] if line.todo else []
    return said


def format_summary(lines: list[ReportLine]) -> str:
    """Return one line that names everything that holds back releases."""
    holding = [line.name for line in lines if line.ok is False]
    if holding:
        return Message(
            "releasable.held", "The release gate would hold back every release because of: {names}", names=holding
        )
    return Message("releasable.free", "Nothing would hold back a release.")


def _held_out(plant: Plant) -> Iterator[ReportLine]:
    try:
        tokenizer = Tokenizer.load(plant.workspace.tokenizer)
    except FactoryError:
        return  # the first shard has not been made yet
    policy, measured = (
        ReleasePolicy.load(plant.workspace.policy_path("gates/release.yaml")),
        EvalPolicy.load(plant.workspace.policy_path("evals.yaml")),
    )
    suite = build_suite(plant.ledger, measured, tokenizer.sha256)
    known = read_group_spreads_by_domain(plant.ledger)
    trained = {
        row["domain"]: row["documents"]
        for row in plant.ledger.read(
            "SELECT domain, COUNT(*) AS documents FROM documents WHERE fate = 'train' GROUP BY domain"
        )
    }
    domains = {name: _domain(suite, name, known.get(name)) for name in sorted({*trained, *suite.domains})}
    tasks, wrong = _tasks(plant.workspace)
    files = list_tasks(task_folder(plant.workspace)).tasks
    chosen = TasksPolicy.load(plant.workspace.policy_path("tasks.yaml"))
    newest = find_champion(plant.ledger)
    right = _cloze_right(plant.ledger, newest.candidate) if newest else None
    sizes = SuiteSizes(
        {name: one for name, one in domains.items() if one.documents},
        cloze_items=len(build_cloze_items(suite, tokenizer, measured)),
        cloze_right=RIGHT if right is None else right,
        tasks={name: _size(task, margin) for name, (task, margin) in tasks.items()},
        tasks_alpha=chosen.guards_alpha,
    )
    found = compute_releasability(policy, sizes)
    guards = {guard.name: guard for guard in found.guards}
    for name, domain in domains.items():
        yield _domain_line(policy, name, domain, guards.get(name), trained.get(name, 0))
    if CLOZE in guards:
        yield _small(
            guards[CLOZE],
            CLOZE,
            Message(
                "releasable.more_for_cloze",
                "Add documents: the factory makes the cloze questions from held-out documents.",
            ),
        )
    for name in tasks:
        yield _small(guards[name], f"task {name}", _larger(chosen, guards[name]))
    for name, why in wrong.items():
        yield ReportLine(
            f"task {name}",
            False,
            why,
            Message(
                "releasable.repair_task",
                "Repair or remove the task's file. To check it: 'factory tasks check {file}'",
                file=shlex.quote(str(files[name])),
            ),
        )
    if found.gain is not None:
        text = Message(
            "releasable.gain",
            "If a model gains {gain:.3f} bits per byte in every domain, the gate detects this gain in 80 of 100 cases. The estimate uses "
            "the {spread} spread between document groups.",
            gain=found.gain,
            spread="measured" if known else "assumed",
        )
        yield ReportLine("gain", True, text)


def _domain(suite: Suite, name: str, spread: float | None) -> DomainSize:
    sealed = suite.list_documents_of_domain(name)
    dev = {document.cluster for document in suite.dev if document.domain == name}
    return DomainSize(len(sealed), len({document.cluster for document in sealed}), len(dev), spread)


def _domain_line(
    policy: ReleasePolicy, name: str, have: DomainSize, guard: GuardRequirement | None, trained: int
) -> ReportLine:
    halves = {"groups": have.groups, "dev_groups": have.dev_groups}
    if guard is not None and guard.state != "missing":
        more = guard.needed is not None and guard.needed > have.groups
        if not more:
            enough = Message(
                "releasable.enough_groups",
                "the sealed half has {groups:,|document group|document groups}, and the dev half has {dev_groups:,}. "
                "The gate needs {needed:,} groups in the sealed half.",
                **halves,
                needed=policy.clusters_min,
            )
            return ReportLine(name, True, enough)
        weak = Message(
            "releasable.weak_guard",
            "the sealed half has {groups:,|document group|document groups}, and the dev half has {dev_groups:,}. The gate needs "
            "{needed:,} groups in the sealed half. But with so few groups, the guard of this domain would pass only {passed:.0%} of equally good "
            "models. With about {wanted:,} groups, this guard would pass 80%.",
            **halves,
            needed=policy.clusters_min,
            passed=guard.passed,
            wanted=guard.needed,
        )
        bring = Message(
            "releasable.more_documents",
            "Add documents of {domain}. Ingest holds out a part of each shard.",
            domain=name,
        )
        return ReportLine(name, None, weak, bring)
    text = Message(
        "releasable.few_groups",
        "the sealed half has {documents:,|document|documents} in {groups:,|group|groups}, and the dev half has {dev_groups:,|group|groups}. The gate "
        "needs {needed_documents:,} documents in {needed:,} groups in the sealed half, and 1 group in the dev half.",
        documents=have.documents,
        **halves,
        needed_documents=policy.documents_min,
        needed=policy.clusters_min,
    )
    if have.documents + trained >= 4 * policy.clusters_min:
        todo = Message(
            "releasable.other_groups",
            "Add documents of other groups. If the documents of a group do not quote one another, make each document its own group: "
            "'factory data relabel --domain {domain} --group document'",
            domain=name,
        )
    else:
        todo = Message(
            "releasable.more_or_other_domain",
            "Add documents of {domain}. Or move these documents to another domain: "
            "'factory data relabel --domain {domain} --to-domain OTHER'",
            domain=name,
        )
    return ReportLine(name, False, text, todo)


def _small(guard: GuardRequirement, name: str, todo: str) -> ReportLine:
    if guard.state == "stands":
        return ReportLine(
            name,
            True,
            Message("releasable.guards", "the task has enough items to be a guard ({items:,})", items=guard.have),
        )
    size = (
        Message("releasable.items_needed", "About {items:,} items are needed.", items=guard.needed)
        if guard.needed
        else Message("releasable.margin_too_small", "This task's margin is so small that no number of items is enough.")
    )
    text = Message(
        "releasable.informs_only",
        "the task is measured, but is not used as a guard. With {items:,|item|items}, {passed:.0%} of equally good models would pass, but a "
        "guard must let 80% pass. {size}",
        items=guard.have,
        passed=guard.passed,
        size=size,
    )
    return ReportLine(name, None, text, todo)


def _larger(policy: TasksPolicy, guard: GuardRequirement) -> str:
    """Return the advice how to make a task a guard."""
    if guard.margin is None:
        return Message("releasable.more_items", "Add items to the task.")
    if command := policy.format_command_to_set(guard.name, "margin", guard.margin):
        return Message(
            "releasable.more_items_or_margin",
            "Add items to the task. Or allow a drop of the task's score by up to {margin:.2f}: '{command}'",
            margin=guard.margin,
            command=command,
        )
    return Message(
        "releasable.more_items_or_file",
        "Add items to the task. Or set the task's margin in tasks.yaml to {margin:.2f}. The guard then allows a drop of the score "
        "by up to this margin.",
        margin=guard.margin,
    )


def _tasks(workspace: Workspace) -> tuple[dict[str, tuple[EvalTask, float]], dict[str, str]]:
    """Return ({name: (task, margin)}, {name: fault of the task}). Tasks that are never measured are left out."""
    policy = TasksPolicy.load(workspace.policy_path("tasks.yaml"))
    found: dict[str, tuple[EvalTask, float]] = {}
    wrong: dict[str, str] = {}
    for name in list_tasks(task_folder(workspace)).tasks:
        if policy.get_settings_of_task(name).tier == "never":
            continue
        try:
            found[name] = load_task_by_name(workspace, name, policy), policy.get_settings_of_task(name).margin
        except FactoryError as error:
            wrong[name] = error.message
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


def _imported_licence(plant: Plant) -> Iterator[ReportLine]:
    """Whether the licence of the imported model allows a release of models that descend from it."""
    found = find_imported_licence(plant.ledger)
    rules = DataPolicy.load(plant.workspace.policy_path("data.yaml")).licences
    if found is None:
        return
    name = "imported model"
    licence, allowed = rules.find_model_licence(found.name)
    if allowed.release:
        text = Message(
            "releasable.imported_allowed",
            "The licence of the imported model ({licence}) allows a release.",
            licence=licence,
        )
        yield ReportLine(name, True, text)
        return
    text = Message(
        "releasable.imported_licence",
        "The licence of the imported model ({licence}) does not allow the release of a model that was trained from it.",
        licence=licence or NONE,
    )
    if licence and not PLAIN.fullmatch(
        licence
    ):  # a file chose this name, so it must not be in a command that a person pastes
        todo = Message(
            "releasable.odd_imported_licence",
            "If {licence!r} allows a release, list it under licences.known in data.yaml.",
            licence=licence,
        )
    elif licence:
        todo = Message(
            "releasable.allow_imported",
            "If {licence} allows a release: 'factory config set data licences.known \"{{{licence}: {{train: true, release: true}}}}\"'",
            licence=licence,
        )
    else:
        todo = Message(
            "releasable.name_imported_licence",
            "Name the licence that the model's authors gave it, for example 'factory config set data licences.imported_model Apache-2.0'",
        )
    yield ReportLine(name, False, text, todo)


def _licences(plant: Plant) -> Iterator[ReportLine]:
    from factory.training.planning import find_last_finished_segment

    policy, data = (
        ReleasePolicy.load(plant.workspace.policy_path("gates/release.yaml")),
        DataPolicy.load(plant.workspace.policy_path("data.yaml")),
    )
    tokens = count_tokens_by_licence(plant.ledger, None, data.licences)
    other = compute_unreleasable_shares(data.licences, tokens)
    share = sum(other.values())
    if share <= policy.not_releasable_max:
        trunk = find_last_finished_segment(plant.ledger, "trunk")
        lineage = [row.id for row in SegmentRow.read_lineage(plant.ledger, trunk.id)] if trunk else []
        shares = {
            number: sum(
                compute_unreleasable_shares(
                    data.licences, count_tokens_by_licence(plant.ledger, number, data.licences)
                ).values()
            )
            for number in lineage
        }
        if spoilt := [number for number, part in shares.items() if part > policy.not_releasable_max]:
            text = Message(
                "releasable.spoilt_trunk",
                "The licences of {share:.1%} of the trunk's training data do not allow a release. Later segments do not use these data, but "
                "the trunk was trained on them.",
                share=shares[spoilt[-1]],
            )
            todo = Message(
                "releasable.rewind",
                "To train the trunk again without these data, go back to the start of segment {segment}: 'factory rewind {segment}'",
                segment=spoilt[0],
            )
            yield ReportLine("licences", False, text, todo)
            return
        allowed = (
            Message(
                "releasable.accepted_share",
                "The licences of {share:.1%} of the data do not allow a release. A share of at most {most:.1%} is accepted.",
                share=share,
                most=policy.not_releasable_max,
            )
            if share
            else Message("releasable.all_allowed", "The licences of all data allow a release.")
        )
        yield ReportLine("licences", True, allowed)
        return
    text = Message(
        "releasable.licence_share",
        "{share:.1%} of the tokens are from documents whose licence does not allow the release of a model: {licences}. "
        "At most {most:.1%} is accepted.",
        share=share,
        licences=[f"{name} {part:.1%}" for name, part in list(other.items())[:NAMED]],
        most=policy.not_releasable_max,
    )
    yield ReportLine("licences", False, text, _allow_or_remove(plant.ledger, next(iter(other))))


def _allow_or_remove(ledger: Ledger, licence: str) -> Message:
    """Return the advice for the documents of a licence that does not allow a release."""
    if licence == NONE:
        return Message(
            "releasable.no_licence",
            "If the documents are yours: 'factory config set data licences.missing \"{{train: true, release: true}}\"'. "
            "Otherwise: 'factory data remove --license {none}'",
            none=NO_LICENCE,
        )
    if not PLAIN.fullmatch(licence):  # a file chose this name, so it must not be in a command that a person pastes
        return Message(
            "releasable.odd_licence",
            "If {licence!r} allows a release, list it under licences.known in data.yaml. Otherwise remove these documents.",
            licence=licence,
        )
    own = ledger.read("SELECT 1 AS one FROM documents WHERE fate = 'train' AND license = :name LIMIT 1", name=licence)
    correct = (
        Message(
            "releasable.rename_licence",
            "'factory data relabel --license \"{licence}\" --to-license NAME'",
            licence=licence,
        )
        if own
        else Message("releasable.settle_licence", "'factory data claims' lists the other licences of the same texts")
    )
    return Message(
        "releasable.known_licence",
        "If {licence} allows a release: 'factory config set data licences.known \"{{{licence}: {{train: true, release: true}}}}\"'. "
        "If the name is wrong: {correct}. Otherwise: 'factory data remove --license \"{licence}\"'",
        licence=licence,
        correct=correct,
    )


def _recipe(plant: Plant) -> Iterator[ReportLine]:
    from factory.training.planning import find_trunk_parent, refuse_changed_model
    from trainer.contract.errors import TrainerError
    from trainer.contract.recipe import Recipe

    try:
        recipe = Recipe.load(plant.workspace.recipe_path())
        refuse_changed_model(plant, recipe, find_trunk_parent(plant.ledger, recipe))
    except (ConfigError, TrainerError) as error:
        yield ReportLine("recipe", False, error.message)
        return
    fits = Message(
        "releasable.recipe_fits",
        "{recipe} fits the vocabulary of {entries:,} entries.",
        recipe=recipe.name,
        entries=recipe.model.vocab_size,
    )
    yield ReportLine("recipe", True, fits)
