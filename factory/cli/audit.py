"""``factory audit``: windows of real segments, replayed without the patches that agents wrote."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer

from factory.cli.app import Say, app, command
from factory.ledger.plant import Plant


@command(app)
def audit(
    plant: Plant,
    say: Say,
    segment: Annotated[
        int | None, typer.Option(help="Audit this segment now, even if its last tries could not be measured.")
    ] = None,
) -> None:
    """Replay the windows of finished segments that wait for it, without the patches that agents wrote; list all that was found.

    The daemon does this by itself when there is nothing else to do; while it runs, it does what is asked for here in its next pass. A difference
    opens a proposal that undoes the patch.
    """
    from factory.audit.auditing import audit
    from factory.audit.policy import AuditPolicy
    from factory.audit.reverts import open_reverts
    from factory.audit.waiting import every_audit, waiting
    from factory.cli.core.beside_daemon import hold_or_ask
    from factory.ledger.rows import SegmentRow
    from factory.show.catching_up import catch_up

    numbers = (
        waiting(plant.ledger, AuditPolicy.load(plant.workspace.policy("gates/audit.yaml")))
        if segment is None
        else [segment]
    )
    if numbers:
        with ExitStack() as held:
            wanted = [f"audit {SegmentRow.get(plant.ledger, number).id}" for number in numbers]
            if said := hold_or_ask(held, plant, wanted):
                say({"segments": numbers, "says": said}, f"  {said}")
                return
            for number in numbers:
                audit(plant, number)
            open_reverts(plant)
            catch_up(plant)
    found = every_audit(plant.ledger)
    say(found)
    for row in found:
        verdict = row["verdict"]
        state = (
            {"promote": "agrees", "hold": "not measured", "reject": "DIFFERS"}[verdict["outcome"]]
            if verdict
            else "waits"
        )
        patches = ", ".join(map(str, row["patches"]))
        say.line(f"segment {row['segment']}, steps {row['first']}–{row['last']}, without proposals {patches}: {state}")
        for reason in verdict["reasons"] if verdict else ():
            say.line(f"    {reason}")
    if not found:
        say.line("  no window was drawn yet: the first is when a segment trains with a patch that an agent wrote")
