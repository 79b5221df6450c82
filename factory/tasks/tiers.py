"""Measures a candidate on the tasks that are due, and compares it with the champion.

The first measured release fixes a task's protocol. If a task file changes the protocol, the gate holds releases until a person makes it the new
baseline (``measure_new_baseline``).
"""

from __future__ import annotations

from typing import Any

from factory.core.errors import IsolationError
from factory.evals.evaluator import read_items_of_evaluation
from factory.ledger.ledger import Ledger, record_event
from factory.ledger.plant import Plant
from factory.ledger.rows import EvaluationRow, find_champion
from factory.tasks.comparing import TaskEvidence, compute_item_counts_and_variances, compute_metric_gains
from factory.tasks.items import TaskError
from factory.tasks.measuring import measure_task
from factory.tasks.policy import TasksPolicy
from factory.tasks.task_file import EvalTask, list_tasks, load_task_by_name, task_folder
from kernels.contract.message import Message


def measure_due_tasks(plant: Plant, candidate: int, *, would_promote: bool) -> TaskEvidence:
    """Measure a candidate and the champion on every task that is due. The evidence names each task that could not be measured.

    Raises: ConfigError for a bad tasks.yaml; DamagedExportError; NoMemoryError.
    """
    policy = TasksPolicy.load(plant.workspace.policy_path("tasks.yaml"))
    names = list(list_tasks(task_folder(plant.workspace)).tasks)
    evidence = TaskEvidence(alpha=policy.guards_alpha)
    for name in sorted(set(policy.tasks) - set(names)):
        problem = Message(
            "tiers.no_file", "tasks.yaml names task {task}, but {file} does not exist.",
            task=name, file=f"{task_folder(plant.workspace) / name}.yaml",
        )  # fmt: skip
        remedy = Message("tiers.write_file", "write the task's file, or remove {task} from tasks.yaml.", task=name)
        evidence = evidence.merge(TaskEvidence.from_problem(problem, remedy))
    for name in names:
        if policy.get_settings_of_task(name).is_due(candidate, would_promote):
            evidence = evidence.merge(_evidence(plant, candidate, name, policy))
    return evidence


def _evidence(plant: Plant, candidate: int, name: str, policy: TasksPolicy) -> TaskEvidence:
    try:
        task = load_task_by_name(plant.workspace, name, policy)
        best = find_champion(plant.ledger)
        if changed := describe_protocol_change(plant.ledger, task):
            todo = Message(
                "tiers.undo_change",
                "undo the change of task {task}, or make the change the new baseline: 'factory tasks run {task} "
                "--baseline'.",
                task=name,
            )
            return TaskEvidence.from_problem(changed, todo)
        ours = measure_task(plant, candidate, task, policy)
        theirs = measure_task(plant, best.candidate, task, policy) if best else None
    except (TaskError, IsolationError) as error:
        never = policy.format_command_to_set(name, "tier", "never")
        todo = Message(
            "tiers.repair",
            "repair task {task} ('factory tasks check FILE' tests it), then run 'factory evaluate {candidate}'. "
            "To stop measuring the task: '{never}'.",
            task=name, candidate=candidate, never=never or "tier: never",
        )  # fmt: skip
        reason = Message.from_parts(error.code, str(error).removesuffix("."), error.data)
        return TaskEvidence.from_problem(
            Message("tiers.not_measured", "Task {task} could not be measured: {reason}.", task=name, reason=reason),
            todo,
        )
    summary = EvaluationRow.get(plant.ledger, ours).summary
    values = {metric: row["value"] for metric, row in summary["metrics"].items()}
    evidence = TaskEvidence(values=values, evaluations={name: [ours, theirs]})
    if theirs is None:
        return evidence
    of_champion = read_items_of_evaluation(plant.ledger, theirs)
    found = compute_metric_gains(read_items_of_evaluation(plant.ledger, ours), of_champion, summary.get("costs", ()))
    if found is None:
        problem = Message(
            "tiers.other_items", "Candidate and champion were not measured on the same items of task {task}.", task=name
        )
        todo = Message(
            "tiers.measure_again",
            "do not change the items of task {task}, and measure candidate and champion again: 'factory evaluate "
            "{candidate}'.",
            task=name, candidate=candidate,
        )  # fmt: skip
        return evidence.merge(TaskEvidence.from_problem(problem, todo))
    margins = dict.fromkeys(found, policy.get_settings_of_task(name).margin)
    items, variances = compute_item_counts_and_variances(of_champion)
    return evidence.merge(TaskEvidence(gains=found, margins=margins, items=items, variances=variances))


def describe_protocol_change(ledger: Ledger, task: EvalTask) -> Message | None:
    """A sentence if the task's protocol differs from that of earlier releases. None: it is the same."""
    fixed = read_baseline(ledger, task.name)
    if fixed is None or fixed["protocol"] == task.protocol_sha256:
        return None
    change = (
        f"{fixed['format']} → {task.format}"
        if fixed["format"] != task.format
        else Message("tiers.other_keys", "the prompt, the examples or another key of the task's file")
    )
    return Message(
        "tiers.changed",
        "Task {task} is measured in another way than for earlier releases, so its scores cannot be compared. "
        "Changed: {change}. Undo the change, or make it the new baseline: 'factory tasks run {task} "
        "--baseline'.",
        task=task.name,
        change=change,
    )


def read_baseline(ledger: Ledger, name: str) -> dict[str, Any] | None:
    """Return {"protocol", "format"}, with which releases are measured on a task; None before the first measured release."""
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


def measure_new_baseline(plant: Plant, task: EvalTask, policy: TasksPolicy, person: str) -> int | None:
    """Make the task's present protocol the baseline and measure the champion with it. Returns the id of the champion's evaluation."""
    best = find_champion(plant.ledger)
    number = measure_task(plant, best.candidate, task, policy) if best else None
    with plant.ledger.begin() as tx:
        detail = {"protocol": task.protocol_sha256, "format": task.format, "by": person, "evaluation": number}
        record_event(tx, "task_baseline", f"task:{task.name}", detail)
    return number
