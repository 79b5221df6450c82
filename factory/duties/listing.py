"""``factory duties``: the list of duties, with the errands that are due, held or resting now, and when each duty was last done.

The daemon notes rests and finished errands in ``logs/duties.json``. The other facts are computed as the daemon computes them. No duty is done.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

from factory.core.faults import find_fault_in
from factory.core.time_formats import format_duration, format_local_time
from factory.core.workspace import Workspace
from factory.duties.duty import Duty, DutyState, DutyTask
from factory.duties.table import DUTIES
from factory.ledger.file_events import find_low_disk
from factory.ledger.plant import Plant
from factory.retrying.failure_waits import FailureWait
from factory.status.waiting import list_failing_actions
from kernels.contract.files import write_atomically
from kernels.contract.message import Message

NAME = "duties.json"  # in logs/: {"done": {duty: {"errand", "at"}}, "rests": {errand: {"until", "failures"}}}
MOST_SHOWN = 5  # errands of a duty


def write_duty_status_file(
    workspace: Workspace, failure_waits: Mapping[str, FailureWait], finished: DutyTask | None = None
) -> None:
    """Write the rests and the finished errand to a file for people. If the disk is full, nothing is written and no error is raised."""
    before, now = read_duty_status_file(workspace), time.time()
    known = before["rests"]
    after = {
        "done": before["done"] | ({finished.duty.name: {"errand": str(finished), "at": now}} if finished else {}),
        "rests": {
            key: known[key] if known.get(key, {}).get("failures") == rest.failures else
            {"until": now + rest.seconds, "failures": rest.failures}
            for key, rest in failure_waits.items()
        },
    }  # fmt: skip
    if after != before:
        with suppress(OSError):
            write_atomically(workspace.logs / NAME, json.dumps(after, indent=1))


def read_duty_status_file(workspace: Workspace) -> dict[str, dict[str, Any]]:
    """Return the content of the note; empty if the note is missing or cannot be read."""
    with suppress(OSError, ValueError):
        found = json.loads((workspace.logs / NAME).read_text())
        if isinstance(found, dict) and all(isinstance(found.get(key), dict) for key in ("done", "rests")):
            return found
    return {"done": {}, "rests": {}}


def collect_duty_facts(plant: Plant) -> list[dict[str, Any]]:
    """Return the facts of each duty: ``rank``, ``name``, ``does``, ``when`` it is looked at, ``due``, ``held``, ``rests``, ``done``.

    ``does``: its description. ``due``: errands, or an error. ``held``: why the duty waits. ``rests``: until when each errand rests, and why.
    ``done``: the last errand, and when it was done. Times are seconds since 1970.
    """
    noted, now = read_duty_status_file(plant.workspace), time.time()
    errors = {one["what"]: one["error"] for one in list_failing_actions(plant.ledger)}
    with plant.ledger.snapshot() as db:
        state = DutyState(plant, db, DUTIES, low_on_disk=find_low_disk(db) is not None, endless=True)
        return [
            {
                "rank": rank,
                "name": duty.name,
                "does": str(duty.description),
                "when": _when(duty),
                "due": _due(duty, state),
                "held": duty.find_reason_for_waiting(state),
                "rests": {
                    key: rest | {"error": errors.get(key, "")}
                    for key, rest in noted["rests"].items()
                    if _of(duty, key) and rest["until"] > now
                },
                "done": noted["done"].get(duty.name),
            }
            for rank, duty in enumerate(DUTIES, 1)
        ]


def _when(duty: Duty) -> str:
    if duty.in_background:
        return f"every {duty.in_background:g} s, in background"
    return {"pass": "once in each pass", "look": "before each later duty", "": "when it is due"}[duty.each]


def _due(duty: Duty, state: DutyState) -> list[str]:
    if duty.in_background or duty.each:
        return []
    try:
        found = list(islice(duty.due(state), MOST_SHOWN))
    except Exception as error:
        if find_fault_in(error):
            raise
        return [f"unknown: {error}"]
    return [str(one if isinstance(one, DutyTask) else DutyTask(duty, one)) for one in found]


def _of(duty: Duty, key: str) -> bool:
    return key in (duty.name, duty.due_check_key) or key.startswith(f"{duty.name} ")


def format_duty_list(found: list[dict[str, Any]]) -> list[str]:
    """Return the facts as lines for people: one line for each duty, and below it its present state."""
    width = max(len(one["name"]) for one in found)
    title = Message(
        "duties.list",
        "The daemon does the first duty that is due, and skips duties that wait. Then the daemon starts again at the top of the list.",
    )
    shown = [title, ""]
    for one in found:
        when = "" if one["when"] == "when it is due" else f" ({one['when']})"
        shown.append(f"{one['rank']:>3}  {one['name']:<{width}}  {one['does']}{when}")
        more = [f"due: {', '.join(one['due'])}"] if one["due"] else []
        more += [f"waits: {one['held']}"] if one["held"] else []
        for key, rest in one["rests"].items():
            more.append(
                Message(
                    "duties.rests",
                    "{errand} failed {failures:,|time|times} and is not tried before {until}{why}",
                    errand=key,
                    until=format_local_time(rest["until"]),
                    failures=rest["failures"],
                    why=f": {rest['error']}" if rest["error"] else "",
                )
            )
        if done := one["done"]:
            more.append(f"last done: {done['errand']}, {format_duration(time.time() - done['at'])} ago")
        shown += [f"{'':>{width + 7}}{line}" for line in more]
    return shown
