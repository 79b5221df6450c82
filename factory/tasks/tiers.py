"""Which tasks a candidate is measured on now, and what came of it, against the champion.

Under which protocol a line of releases is measured is fixed by the first of its releases that was: a task file that says another is held,
by name, until a person takes it as the new baseline (``take_baseline``).
"""

from __future__ import annotations

from typing import Any

from factory.core.errors import IsolationError
from factory.evals.evaluator import items_of
from factory.ledger.ledger import Ledger, record
from factory.ledger.plant import Plant
from factory.ledger.rows import EvaluationRow, champion
from factory.tasks.comparing import TaskEvidence, gains, sizes
from factory.tasks.items import TaskError
from factory.tasks.measuring import measure
from factory.tasks.policy import TasksPolicy
from factory.tasks.task_file import EvalTask, load_named, look_into, task_folder


def measure_due(plant: Plant, candidate: int, *, would_promote: bool) -> TaskEvidence:
    """Measure a candidate, and the champion, on every task that is due. What could not be measured is a sentence of the evidence.

    Raises: ConfigError for a bad tasks.yaml; DamagedExportError; NoMemoryError.
    """
    policy = TasksPolicy.load(plant.workspace.policy("tasks.yaml"))
    names = list(look_into(task_folder(plant.workspace)).tasks)
    evidence = TaskEvidence(alpha=policy.guards_alpha)
    for name in sorted(set(policy.tasks) - set(names)):
        words = f"Task {name}: tasks.yaml names it, and there is no {task_folder(plant.workspace) / name}.yaml."
        evidence = evidence.with_other(
            TaskEvidence.problem(words, f"write that file, or take {name} out of tasks.yaml.")
        )
    for name in names:
        if policy.of(name).due(candidate, would_promote):
            evidence = evidence.with_other(_evidence(plant, candidate, name, policy))
    return evidence


def _evidence(plant: Plant, candidate: int, name: str, policy: TasksPolicy) -> TaskEvidence:
    try:
        task = load_named(plant.workspace, name, policy)
        best = champion(plant.ledger)
        if changed := changed_since_baseline(plant.ledger, task):
            todo = f"take the change of task {name} back, or make it the new baseline: 'factory tasks run {name} --baseline'."
            return TaskEvidence.problem(changed, todo)
        ours = measure(plant, candidate, task, policy)
        theirs = measure(plant, best.candidate, task, policy) if best else None
    except (TaskError, IsolationError) as error:
        never = policy.setting(name, "tier", "never")
        todo = (
            f"mend task {name} ('factory tasks check FILE' looks at it), then 'factory evaluate {candidate}'; or measure it no more: "
            + (f"'{never}'." if never else "tier: never in tasks.yaml.")
        )
        return TaskEvidence.problem(f"Task {name} could not be measured: {str(error).removesuffix('.')}.", todo)
    summary = EvaluationRow.get(plant.ledger, ours).summary
    values = {metric: row["value"] for metric, row in summary["metrics"].items()}
    evidence = TaskEvidence(values=values, evaluations={name: [ours, theirs]})
    if theirs is None:
        return evidence
    of_champion = items_of(plant.ledger, theirs)
    found = gains(items_of(plant.ledger, ours), of_champion, summary.get("costs", ()))
    if found is None:
        words = f"Task {name}: candidate and champion were not measured on the same items."
        todo = f"measure both again: 'factory evaluate {candidate}' once nothing changes {name}'s items."
        return evidence.with_other(TaskEvidence.problem(words, todo))
    margins = dict.fromkeys(found, policy.of(name).margin)
    items, variances = sizes(of_champion)
    return evidence.with_other(TaskEvidence(gains=found, margins=margins, items=items, variances=variances))


def changed_since_baseline(ledger: Ledger, task: EvalTask) -> str:
    """A sentence when the task is measured in another way than the releases of the line were; else nothing."""
    fixed = baseline(ledger, task.name)
    if fixed is None or fixed["protocol"] == task.protocol:
        return ""
    how = (
        f"{fixed['format']} → {task.format}"
        if fixed["format"] != task.format
        else "prompt, examples or another key of its file"
    )
    return (
        f"Task {task.name}: it is measured in another way than the releases before ({how}), so no number compares: take it back, or make "
        f"it the new baseline with 'factory tasks run {task.name} --baseline'."
    )


def baseline(ledger: Ledger, name: str) -> dict[str, Any] | None:
    """{"protocol", "format"} by which the line of releases is measured on a task; None before a release was measured."""
    taken = ledger.read(
        "SELECT detail FROM events WHERE kind = 'task_baseline' AND subject = :subject ORDER BY id DESC LIMIT 1",
        subject=f"task:{name}",
    )
    if taken:
        return dict(taken[0]["detail"])
    rows = EvaluationRow.select(
        ledger,
        "WHERE suite_sha256 LIKE 'task:%' AND candidate IN (SELECT candidate FROM releases) ORDER BY id",
    )
    return next((row.summary for row in rows if row.summary.get("task") == name), None)


def take_baseline(plant: Plant, task: EvalTask, policy: TasksPolicy, by: str) -> int | None:
    """From now on the line is measured as the task's file says; the champion is measured so at once. Returns its evaluation's id."""
    best = champion(plant.ledger)
    number = measure(plant, best.candidate, task, policy) if best else None
    with plant.ledger.begin() as tx:
        detail = {"protocol": task.protocol, "format": task.format, "by": by, "evaluation": number}
        record(tx, "task_baseline", f"task:{task.name}", detail)
    return number
