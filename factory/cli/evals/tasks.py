"""The command ``factory tasks``: lists the evaluation tasks in ``policies/tasks/``, checks a task file, and measures a candidate on a task."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factory.cli.core.options import AnswerPrinter, get_current_user, register_command
from factory.ledger.plant import Plant
from kernels.contract.message import Message

if TYPE_CHECKING:
    from factory.tasks.task_file import EvalTask

commands = typer.Typer(
    help="Evaluation tasks: list them, check their files, measure a candidate.", no_args_is_help=True
)


@register_command(commands, "list")
def list_tasks(plant: Plant, say: AnswerPrinter) -> None:
    """List the tasks in policies/tasks/ with tier, format, and the scores of the candidate that was measured last."""
    from factory.ledger.rows import EvaluationRow
    from factory.tasks.items import TaskError
    from factory.tasks.policy import TasksPolicy
    from factory.tasks.task_file import list_tasks, load_task_by_name, task_folder

    policy = TasksPolicy.load(plant.workspace.policy_path("tasks.yaml"))
    newest = {
        row.summary.get("task"): row
        for row in EvaluationRow.select(plant.ledger, "WHERE suite_sha256 LIKE 'task:%' ORDER BY id")
    }
    found: list[dict[str, Any]] = []
    folder = list_tasks(task_folder(plant.workspace))
    for name in folder.tasks:
        row: dict[str, Any] = {"task": name, **policy.get_settings_of_task(name).model_dump()}
        try:
            row |= _described(load_task_by_name(plant.workspace, name, policy))
        except TaskError as error:
            row["problem"] = str(error)
        if name in newest:
            row |= {"candidate": newest[name].candidate, "metrics": newest[name].summary["metrics"]}
        found.append(row)
    say(found + [{"file": name, "problem": why} for name, why in folder.others.items()])
    for row in found:
        tier = f"every {row['every']}." if row["tier"] == "every" else row["tier"]
        about = row.get("problem") or f"{row['format']}, {row['items']} items"
        say.print_line(f"{row['task']}  {tier}  {about}")
        if "metrics" in row:
            say.print_line(f"    candidate {row['candidate']}: {_scores(row['metrics'])}")
    for name, why in folder.others.items():
        say.print_line(f"{name}: {why}")
    if not found:
        say.print_line(
            Message(
                "tasks.none",
                "  {folder} has no task file. docs/TASKS.md explains how to write a task.",
                folder=task_folder(plant.workspace),
            )
        )


@register_command(commands)
def check(
    plant: Plant,
    say: AnswerPrinter,
    file: Annotated[Path, typer.Argument(help="A task's YAML file, or a published benchmark's.")],
) -> None:
    """Check a task: right answers score 1, empty answers score 0 or chance, its tests can fail, and no item is also an example.

    The command also looks for the items in the training data.
    """
    from dataclasses import asdict

    from factory.tasks.measuring import find_contaminated_items
    from factory.tasks.policy import TasksPolicy
    from factory.tasks.proving import prove_task
    from factory.tasks.task_file import list_tasks, load_task, task_folder

    policy = TasksPolicy.load(plant.workspace.policy_path("tasks.yaml"))
    task = load_task(file, policy)
    proof = prove_task(plant.ledger, task, policy, plant.progress)
    hits = find_contaminated_items(plant, task)
    found = {"task": task.name, **_described(task), "contaminated": len(hits), "in": [key for _, key in hits[:20]]}
    found |= {"proof": asdict(proof), "notes": list(task.notes)}
    sound = Message(
        "tasks.sound",
        "  {task} is sound: {format}, {items:,|item|items} of {sources} sources",
        task=task.name,
        format=task.format,
        items=found["items"],
        sources=found["clusters"] or "unknown",
    )
    say(found, sound)
    if said := proof.describe():
        say.print_line(f"  proven: {'; '.join(said)}")
    for words in (
        *task.notes,
        *(f"{name}: {why}" for name, why in list_tasks(task_folder(plant.workspace)).others.items()),
    ):
        say.print_line(f"  {words}")
    if hits:
        say.print_line(
            Message(
                "tasks.contaminated",
                "  {hits} of {items} items are in training data that was ingested before the task. The first of "
                "these items is in document {document}. If more than {most:.0%} of a task's items are in training "
                "data, every candidate gets the verdict 'hold' (contaminated_max in tasks.yaml).",
                hits=len(hits),
                items=found["items"],
                document=hits[0][1],
                most=policy.contaminated_max,
            )
        )


@register_command(commands)
def run(
    plant: Plant,
    say: AnswerPrinter,
    name: Annotated[str, typer.Argument(help="The name of a task in policies/tasks/.")],
    candidate: Annotated[int | None, typer.Option(help="The candidate (default: the champion).")] = None,
    take_baseline: Annotated[
        bool, typer.Option("--baseline", help="Accept the task file as it is now for measuring all later releases.")
    ] = False,
) -> None:
    """Measure a candidate on one task of any tier, and record each item. If the candidate was measured before, print the recorded result."""
    from factory.core.errors import InputError
    from factory.ledger.rows import EvaluationRow, find_champion
    from factory.tasks import tiers
    from factory.tasks.measuring import measure_task
    from factory.tasks.policy import TasksPolicy
    from factory.tasks.task_file import load_task_by_name

    policy = TasksPolicy.load(plant.workspace.policy_path("tasks.yaml"))
    task = load_task_by_name(plant.workspace, name, policy)
    if take_baseline:
        tiers.measure_new_baseline(plant, task, policy, get_current_user())
    best = find_champion(plant.ledger)
    number = candidate if candidate is not None else best.candidate if best else None
    if number is None:
        raise InputError("tasks.no_champion", "There is no champion yet. To measure a candidate, add '--candidate N'.")
    row = EvaluationRow.get(plant.ledger, measure_task(plant, number, task, policy))
    changed = tiers.describe_protocol_change(plant.ledger, task)
    say(
        {"candidate": number, "evaluation": row.id, "held": changed, **row.summary},
        f"  candidate {number}, {task.name}: {_scores(row.summary['metrics'])}",
    )
    say.print_line(
        f"    {row.summary['items']} items of {row.summary['clusters']} sources; {task.format}; {row.summary['device']}"
    )
    for words in (*_notes(row.summary), changed):
        if words:
            say.print_line(f"    {words}")


def _described(task: EvalTask) -> dict[str, Any]:
    return {
        "kind": task.kind,
        "format": task.format,
        "items": len(task.records),
        "clusters": len({item.cluster for item in task.items}),
        "protocol": task.protocol_sha256,
    }


def _notes(summary: dict[str, Any]) -> list[str]:
    stopped = ", ".join(f"{count} over the {limit} limit" for limit, count in summary.get("stopped", {}).items())
    totals = ", ".join(f"{name} {value:.4f}" for name, value in summary.get("totals", {}).items())
    notes: list[str] = []
    if count := summary["cut"]:
        notes.append(
            Message(
                "tasks.cut",
                "{contexts:,|prompt was|prompts were} longer than the model's context and therefore cut off at the beginning.",
                contexts=count,
            )
        )
    if count := summary["contaminated"]:
        notes.append(
            Message("tasks.items_trained_on", "{items:,|item is|items are} in the training data.", items=count)
        )
    if count := summary.get("never_ended"):
        notes.append(
            Message("tasks.never_ended", "{answers:,|answer|answers} did not end within max_tokens.", answers=count)
        )
    if stopped:
        notes.append(Message("tasks.stopped", "Some answers were stopped at a limit: {limits}", limits=stopped))
    if totals:
        notes.append(Message("tasks.totals", "Totals that lm-eval computed: {totals}", totals=totals))
    return notes


def _scores(metrics: dict[str, Any]) -> str:
    return ", ".join(
        f"{name.split('/', 1)[1]} {row['value']:.3f}" + (f" ± {row['error']:.3f}" if row["error"] is not None else "")
        for name, row in metrics.items()
    )
