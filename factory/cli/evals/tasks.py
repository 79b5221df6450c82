"""``factory tasks``: the evaluation tasks of ``policies/tasks/``: which there are, whether they are sound, what a candidate scores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factory.cli.core.options import Say, command, person
from factory.ledger.plant import Plant

if TYPE_CHECKING:
    from factory.tasks.task_file import EvalTask

commands = typer.Typer(
    help="Evaluation tasks: list them, check their files, measure a candidate.", no_args_is_help=True
)


@command(commands, "list")
def list_(plant: Plant, say: Say) -> None:
    """List the tasks in policies/tasks/ with their tier, their format, and what the newest candidate that was measured scores."""
    from factory.ledger.rows import EvaluationRow
    from factory.tasks.items import TaskError
    from factory.tasks.policy import TasksPolicy
    from factory.tasks.task_file import load_named, look_into, task_folder

    policy = TasksPolicy.load(plant.workspace.policy("tasks.yaml"))
    newest = {
        row.summary.get("task"): row
        for row in EvaluationRow.select(plant.ledger, "WHERE suite_sha256 LIKE 'task:%' ORDER BY id")
    }
    found: list[dict[str, Any]] = []
    folder = look_into(task_folder(plant.workspace))
    for name in folder.tasks:
        row: dict[str, Any] = {"task": name, **policy.of(name).model_dump()}
        try:
            row |= _described(load_named(plant.workspace, name, policy))
        except TaskError as error:
            row["problem"] = str(error)
        if name in newest:
            row |= {"candidate": newest[name].candidate, "metrics": newest[name].summary["metrics"]}
        found.append(row)
    say(found + [{"file": name, "problem": why} for name, why in folder.others.items()])
    for row in found:
        tier = f"every {row['every']}." if row["tier"] == "every" else row["tier"]
        about = row.get("problem") or f"{row['format']}, {row['items']} items"
        say.line(f"{row['task']}  {tier}  {about}")
        if "metrics" in row:
            say.line(f"    candidate {row['candidate']}: {_scores(row['metrics'])}")
    for name, why in folder.others.items():
        say.line(f"{name}: {why}")
    if not found:
        say.line(f"  no task file in {task_folder(plant.workspace)}: docs/TASKS.md says how to write one")


@command(commands)
def check(
    plant: Plant,
    say: Say,
    file: Annotated[Path, typer.Argument(help="A task's YAML file, or a published benchmark's.")],
) -> None:
    """Prove a task: right answers score 1, empty ones 0 or chance, tests can fail, no item is an example; look for items in the training data."""
    from dataclasses import asdict

    from factory.tasks.measuring import trained_on
    from factory.tasks.policy import TasksPolicy
    from factory.tasks.proving import prove
    from factory.tasks.task_file import load_task, look_into, task_folder

    policy = TasksPolicy.load(plant.workspace.policy("tasks.yaml"))
    task = load_task(file, policy)
    proof = prove(plant.ledger, task, policy, plant.progress)
    hits = trained_on(plant, task)
    found = {"task": task.name, **_described(task), "contaminated": len(hits), "in": [key for _, key in hits[:20]]}
    found |= {"proof": asdict(proof), "notes": list(task.notes)}
    say(
        found,
        f"  {task.name}: {task.format}, {found['items']} items of {found['clusters'] or 'unknown'} sources: sound",
    )
    if said := proof.words():
        say.line(f"  proven: {'; '.join(said)}")
    for words in (
        *task.notes,
        *(f"{name}: {why}" for name, why in look_into(task_folder(plant.workspace)).others.items()),
    ):
        say.line(f"  {words}")
    if hits:
        say.line(
            f"  {len(hits)} of {found['items']} items are in training data from before the task (first: in document {hits[0][1]}); "
            f"a task with more than {policy.contaminated_max:.0%} holds every candidate (contaminated_max in tasks.yaml)"
        )


@command(commands)
def run(
    plant: Plant,
    say: Say,
    name: Annotated[str, typer.Argument(help="A task of policies/tasks/.")],
    candidate: Annotated[int | None, typer.Option(help="The candidate (default: the champion).")] = None,
    take_baseline: Annotated[
        bool, typer.Option("--baseline", help="From now on the line of releases is measured as the file says now.")
    ] = False,
) -> None:
    """Measure a candidate on one task, whatever its tier, and record each item. Measured already, it is told again."""
    from factory.core.errors import InputError
    from factory.ledger.rows import EvaluationRow, champion
    from factory.tasks import tiers
    from factory.tasks.measuring import measure
    from factory.tasks.policy import TasksPolicy
    from factory.tasks.task_file import load_named

    policy = TasksPolicy.load(plant.workspace.policy("tasks.yaml"))
    task = load_named(plant.workspace, name, policy)
    if take_baseline:
        tiers.take_baseline(plant, task, policy, person())
    best = champion(plant.ledger)
    number = candidate if candidate is not None else best.candidate if best else None
    if number is None:
        raise InputError("there is no champion yet: say which candidate, with --candidate")
    row = EvaluationRow.get(plant.ledger, measure(plant, number, task, policy))
    changed = tiers.changed_since_baseline(plant.ledger, task)
    say(
        {"candidate": number, "evaluation": row.id, "held": changed, **row.summary},
        f"  candidate {number}, {task.name}: {_scores(row.summary['metrics'])}",
    )
    say.line(
        f"    {row.summary['items']} items of {row.summary['clusters']} sources; {task.format}; {row.summary['device']}"
    )
    for words in (*_notes(row.summary), changed):
        if words:
            say.line(f"    {words}")


def _described(task: EvalTask) -> dict[str, Any]:
    return {
        "kind": task.kind,
        "format": task.format,
        "items": len(task.records),
        "clusters": len({item.cluster for item in task.items}),
        "protocol": task.protocol,
    }


def _notes(summary: dict[str, Any]) -> list[str]:
    stopped = ", ".join(f"{count} over the {limit} limit" for limit, count in summary.get("stopped", {}).items())
    totals = ", ".join(f"{name} {value:.4f}" for name, value in summary.get("totals", {}).items())
    return [
        words
        for count, words in (
            (summary["cut"], f"{summary['cut']} contexts were longer than the model's and lost their beginning"),
            (summary["contaminated"], f"{summary['contaminated']} items stand in training data"),
            (summary.get("never_ended"), f"{summary.get('never_ended')} answers did not end before max_tokens"),
            (stopped, f"answers that were stopped: {stopped}"),
            (totals, f"lm-eval's own totals: {totals}"),
        )
        if count
    ]


def _scores(metrics: dict[str, Any]) -> str:
    return ", ".join(
        f"{name.split('/', 1)[1]} {row['value']:.3f}" + (f" ± {row['error']:.3f}" if row["error"] is not None else "")
        for name, row in metrics.items()
    )
