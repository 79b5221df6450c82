"""Opens a revert of every patch that an audit found to make a difference, or that the loss doctor blames for an anomaly."""

from __future__ import annotations

from factory.audit.drawing import AUDITED
from factory.code_loop.revalidating import AUDIT, REMIND_SECONDS
from factory.core.errors import FactoryError, WorkspaceError
from factory.ledger.anomalies import CLOSED, DIAGNOSED, DIAGNOSIS, REJECTED, newest_about
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow, Subject, VerdictRow
from factory.ledger.writing import record_once


def open_reverts(plant: Plant) -> list[int]:
    """A proposal to undo every approved patch that made a difference and has none yet; returns their numbers.

    What keeps one from being opened is recorded and shown once a day.
    """
    wanted = _to_undo(plant.ledger)
    if not wanted:
        return []
    from factory.code_loop.reverting import open_revert
    from factory.code_loop.submitting import clear_stale

    made = []
    try:
        with plant.workspace.lock("code-loop"):
            clear_stale(plant)
            for row, why in wanted:
                try:
                    made.append(open_revert(plant, row, why))
                except FactoryError as error:
                    detail = {"why": str(error)}
                    if record_once(
                        plant.ledger, "audit_revert_waits", Subject("proposal", row.number), detail, REMIND_SECONDS
                    ):
                        plant.progress.line(
                            f"  proposal {row.number} made a difference and must be undone by hand: {error}"
                        )
    except WorkspaceError:
        return made  # another process proposes now: the next pass tries again
    return made


def _to_undo(ledger: Ledger) -> list[tuple[ProposalRow, VerdictRow]]:
    """Approved proposals that an audit or a diagnosis blames, and its verdict, where no revert is open."""
    from factory.code_loop.reverting import opened

    found = {}
    sql = "SELECT subject, detail FROM events WHERE kind = :kind ORDER BY id"
    for event in ledger.read(sql, kind=AUDITED):
        for number in event["detail"]["suspects"] if event["detail"]["outcome"] == "reject" else ():
            row, why = (
                ProposalRow.get(ledger, number),
                VerdictRow.newest(ledger, AUDIT, Subject.parse(event["subject"])),
            )
            if row.state == "approved" and why is not None and opened(ledger, number) is None:
                found[number] = (row, why)
    closed = newest_about(ledger, CLOSED)
    for event in ledger.read(sql, kind=DIAGNOSED):
        end = closed.get(Subject.parse(event["subject"]).number)
        for number in event["detail"].get("undo", ()) if not end or end["how"] != REJECTED else ():
            row, why = (
                ProposalRow.get(ledger, number),
                VerdictRow.newest(ledger, DIAGNOSIS, Subject("segment", event["detail"]["segment"])),
            )
            if row.state == "approved" and why is not None and opened(ledger, number) is None:
                found[number] = (row, why)
    return list(found.values())
