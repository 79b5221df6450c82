"""``factory diagnose`` and ``factory anomalies``: what went wrong while training, why, and what is done about it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Any

import typer

from factory.cli.app import Say, app, command, person
from factory.ledger.plant import Plant

anomalies = typer.Typer(no_args_is_help=True, help="What went wrong while training, and what is done about it.")
app.add_typer(anomalies, name="anomalies")
Number = Annotated[int, typer.Argument(help="The anomaly's number, as 'factory anomalies list' has it.")]


@command(app)
def diagnose(
    plant: Plant,
    say: Say,
    anomaly: Annotated[
        int | None, typer.Argument(help="Its number; without one, the oldest that was not diagnosed.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Replay at most so many steps, whatever the policy says.")] = None,
) -> None:
    """Replay the window of an anomaly under arms, one thing changed in each, until its cause is known; then do what the policy says.

    The daemon does this by itself after a segment that had one; while it runs, it does this in its next pass.
    """
    from factory.cli.core.ask_daemon import hold_or_ask
    from factory.diagnosis.diagnosing import diagnose_and_act
    from factory.diagnosis.wording import word_waiting
    from factory.gates.release.anomaly_policy import AnomalyPolicy
    from factory.ledger.anomalies import AnomalyRow, undiagnosed
    from factory.show.catching_up import catch_up

    kinds = AnomalyPolicy.load(plant.workspace.policy("anomalies.yaml")).kinds
    number = undiagnosed(plant.ledger, kinds) if anomaly is None else anomaly
    if number is None:
        say({}, "  no anomaly waits for a diagnosis")
        return
    with ExitStack() as held:
        wanted = [f"diagnose {AnomalyRow.get(plant.ledger, number).id}"]
        if said := hold_or_ask(held, plant, wanted, replayed_steps=steps):
            say({"anomaly": number, "says": said}, f"  {said}")
            return
        found = diagnose_and_act(plant, number, steps)
        word_waiting(plant)
        catch_up(plant)
    say(found, f"    {found['why']}")


@command(anomalies, "list")
def list_anomalies(plant: Plant, say: Say) -> None:
    """Every anomaly: its segment and step, what the loss doctor found, and what became of it."""
    from factory.ledger.anomalies import every_anomaly

    found = every_anomaly(plant.ledger)
    say(found, (_line(row) for row in found), nothing="  no anomaly was reported yet")


def _line(row: dict[str, Any]) -> str:
    causes = f": {' or '.join(row['causes'])}" if row["causes"] else ""
    ended = f" ({row['how']})" if row["how"] else ""
    return f"anomaly {row['id']}  segment {row['segment']}, step {row['step']}  {row['kind']}  {row['state']}{causes}{ended}"


@command(anomalies, "show")
def show_anomaly(plant: Plant, say: Say, number: Number) -> None:
    """The diagnosis of one: every arm, the documents, the report."""
    from factory.ledger.anomalies import (
        DEV_ALONE,
        DIAGNOSED,
        AnomalyRow,
        draft_of,
        every_anomaly,
        newest_about,
        words_about,
        words_state,
    )

    AnomalyRow.get(plant.ledger, number)
    row = next(row for row in every_anomaly(plant.ledger) if row["id"] == number)
    diagnosis = newest_about(plant.ledger, DIAGNOSED).get(number)
    said = words_about(plant.ledger, number)
    say(row | {"diagnosis": diagnosis, "words": said}, _line(row))
    if row["kind"] == DEV_ALONE:
        detail = AnomalyRow.get(plant.ledger, number).detail or {}
        say.line(
            f"    {detail.get('why', '')} Verdict {detail.get('verdict')} holds candidate {detail.get('candidate')}."
        )
        return
    if diagnosis is None:
        say.line(f"    not diagnosed yet: 'factory diagnose {number}'")
        return
    say.line(f"    {diagnosis['why']}")
    for arm in diagnosis["arms"]:
        shows = {True: "there", False: "gone", None: "unclear"}[arm["fires"]]
        say.line(f"    {arm['arm']:<44} {shows:<8} {arm['failed']}")
    for name in ("guilty", "triggers"):
        if diagnosis[name]:
            say.line(f"    {name}: {', '.join(diagnosis[name])}")
    say.line(f"    {words_state(diagnosis, said)}")
    for claim in said["claims"] if said else ():
        say.line(f"      {claim['says']} [{claim['rests_on']}: {claim['shows']}]")
    if draft := draft_of(diagnosis):
        say.line(f"    {draft}")
    say.line(f"    report: {diagnosis['report']}")


@command(anomalies, "accept")
def accept_diagnosis(plant: Plant, say: Say, number: Number) -> None:
    """Do what the diagnosis proposes (quarantine and rewind, or rewind and train with another rate for a while); where it proposes nothing,
    take the anomaly as it is. Close it."""
    from factory.diagnosis.acting import accept

    said = accept(plant.ledger, number, person())
    say({"anomaly": number, "says": said}, f"  anomaly {number}: {said}")


@command(anomalies, "reject")
def reject_diagnosis(plant: Plant, say: Say, number: Number) -> None:
    """The diagnosis is wrong: documents that were quarantined for it are trained on again from the next segment on, and a rate that was
    lowered for it is not. Close it."""
    from factory.diagnosis.acting import reject

    said = reject(plant.ledger, number, person())
    say({"anomaly": number, "says": said}, f"  anomaly {number}: {said}")
