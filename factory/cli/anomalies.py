"""The commands ``factory diagnose`` and ``factory anomalies``: find the cause of a training anomaly, and decide what to do about the anomaly."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Any

import typer

from factory.cli.app import AnswerPrinter, app, get_current_user, register_command
from factory.ledger.plant import Plant
from kernels.contract.message import Message

anomalies = typer.Typer(
    no_args_is_help=True, help="Anomalies of training: list them, show a diagnosis, accept or reject it."
)
app.add_typer(anomalies, name="anomalies")
Number = Annotated[int, typer.Argument(help="The anomaly's number, as 'factory anomalies list' prints it.")]


@register_command(app)
def diagnose(
    plant: Plant,
    say: AnswerPrinter,
    anomaly: Annotated[
        int | None, typer.Argument(help="The anomaly's number (default: the oldest one without a diagnosis).")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Replay at most this many steps, instead of the policy's limit.")
    ] = None,
) -> None:
    """Find the cause of an anomaly, then act as policies/anomalies.yaml says.

    The loss doctor replays the steps around the anomaly several times, each time with one thing changed, until the cause is known. The
    daemon does this by itself after a segment with an anomaly. While the daemon runs, this command asks the daemon to do this in its
    next pass.
    """
    from factory.cli.core.ask_daemon import take_lock_or_ask_daemon
    from factory.diagnosis.diagnosing import diagnose_and_act
    from factory.diagnosis.wording import describe_waiting_diagnoses
    from factory.gates.release.anomaly_policy import AnomalyPolicy
    from factory.ledger.anomalies import AnomalyRow, find_next_undiagnosed_anomaly
    from factory.show.unshown_items import show_unshown_items

    kinds = AnomalyPolicy.load(plant.workspace.policy_path("anomalies.yaml")).kinds
    number = find_next_undiagnosed_anomaly(plant.ledger, kinds) if anomaly is None else anomaly
    if number is None:
        say({}, Message("anomalies.none_waits", "  No anomaly waits for a diagnosis."))
        return
    with ExitStack() as held:
        wanted = [f"diagnose {AnomalyRow.get(plant.ledger, number).id}"]
        if said := take_lock_or_ask_daemon(held, plant, wanted, replayed_steps=steps):
            say({"anomaly": number, "says": said}, f"  {said}")
            return
        found = diagnose_and_act(plant, number, steps)
        describe_waiting_diagnoses(plant)
        show_unshown_items(plant)
    say(found, f"    {found['why']}")


@register_command(anomalies, "list")
def list_anomalies(plant: Plant, say: AnswerPrinter) -> None:
    """List every anomaly: its segment and step, the cause that the loss doctor found, and its state."""
    from factory.ledger.anomalies import list_anomalies

    found = list_anomalies(plant.ledger)
    say(found, (_line(row) for row in found), nothing=Message("anomalies.none", "  No anomaly was reported yet."))


def _line(row: dict[str, Any]) -> str:
    causes = f": {' or '.join(row['causes'])}" if row["causes"] else ""
    ended = f" ({row['how']})" if row["how"] else ""
    return f"anomaly {row['id']}  segment {row['segment']}, step {row['step']}  {row['kind']}  {row['state']}{causes}{ended}"


@register_command(anomalies, "show")
def show_anomaly(plant: Plant, say: AnswerPrinter, number: Number) -> None:
    """Show the diagnosis of one anomaly: every replay, the documents involved, and the report."""
    from factory.ledger.anomalies import (
        DIAGNOSED,
        GAIN_ON_DEV_ONLY,
        AnomalyRow,
        describe_explanation,
        draft_learning_rate_proposal,
        find_explanation,
        list_anomalies,
        read_newest_details_by_anomaly,
    )

    AnomalyRow.get(plant.ledger, number)
    row = next(row for row in list_anomalies(plant.ledger) if row["id"] == number)
    diagnosis = read_newest_details_by_anomaly(plant.ledger, DIAGNOSED).get(number)
    said = find_explanation(plant.ledger, number)
    say(row | {"diagnosis": diagnosis, "words": said}, _line(row))
    if row["kind"] == GAIN_ON_DEV_ONLY:
        detail = AnomalyRow.get(plant.ledger, number).detail or {}
        say.print_line(
            f"    {detail.get('why', '')} Verdict {detail.get('verdict')} holds candidate {detail.get('candidate')}."
        )
        return
    if diagnosis is None:
        say.print_line(
            Message(
                "anomalies.not_diagnosed",
                "    Anomaly {number} has no diagnosis yet. To diagnose it now: 'factory diagnose {number}'",
                number=number,
            )
        )
        return
    say.print_line(f"    {diagnosis['why']}")
    for arm in diagnosis["arms"]:
        shows = {True: "there", False: "gone", None: "unclear"}[arm["fires"]]
        say.print_line(f"    {arm['arm']:<44} {shows:<8} {arm['failed']}")
    for name in ("guilty", "triggers"):
        if diagnosis[name]:
            say.print_line(f"    {name}: {', '.join(diagnosis[name])}")
    say.print_line(f"    {describe_explanation(diagnosis, said)}")
    for claim in said["claims"] if said else ():
        say.print_line(f"      {claim['says']} [{claim['rests_on']}: {claim['shows']}]")
    if draft := draft_learning_rate_proposal(diagnosis):
        say.print_line(f"    {draft}")
    say.print_line(f"    report: {diagnosis['report']}")


@register_command(anomalies, "accept")
def accept_diagnosis(plant: Plant, say: AnswerPrinter, number: Number) -> None:
    """Do what the diagnosis proposes, and close the anomaly.

    A diagnosis may propose to quarantine documents and rewind, or to rewind and train with another learning rate for a while. If the
    diagnosis proposes nothing, the anomaly is only closed.
    """
    from factory.diagnosis.remedies import accept_diagnosis

    said = accept_diagnosis(plant.ledger, number, get_current_user())
    say({"anomaly": number, "says": said}, f"  anomaly {number}: {said}")


@register_command(anomalies, "reject")
def reject_diagnosis(plant: Plant, say: AnswerPrinter, number: Number) -> None:
    """Say that the diagnosis is wrong, and close the anomaly.

    From the next segment on, the documents that were quarantined for this diagnosis are trained on again, and a learning rate that was
    lowered for this diagnosis has its normal value again.
    """
    from factory.diagnosis.remedies import reject_diagnosis

    said = reject_diagnosis(plant.ledger, number, get_current_user())
    say({"anomaly": number, "says": said}, f"  anomaly {number}: {said}")
