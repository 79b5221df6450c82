"""Delivers notifications to each receiver, in the order of the events, each at least once.

Each receiver has its own position in ``notified.json``, which is written after each delivery. If the process is killed between delivery and write,
the notification is delivered again. A receiver that fails keeps its position and is tried again after a wait. Other receivers do not wait for it.
"""

from __future__ import annotations

import json
from typing import Any

from factory.core.errors import ConfigError
from factory.core.time_formats import format_duration
from factory.core.workspace import Workspace
from factory.ledger.plant import Plant
from factory.retrying.failure_waits import FailureWaits
from factory.show.notifications.notifications import make_notification_of_event
from factory.show.notifications.receivers import NotDeliveredError, NotificationPolicy, Receiver, make_receivers
from factory.status.delivery_positions import FILE, read_delivery_positions
from kernels.contract.files import write_atomically
from kernels.contract.message import Message

EVENTS_AT_ONCE = 200


class Notifier:
    """Delivers new events; call ``deliver_new_events`` every few seconds. The waits after failures are kept in memory only."""

    def __init__(self, plant: Plant) -> None:
        self.workspace, self.ledger, self.progress = plant.workspace, plant.ledger, plant.progress
        self._backoff: FailureWaits | None = None
        self._looked_at: dict[str, int] = {}  # by receiver: the newest event that was delivered or skipped

    def deliver_new_events(self) -> None:
        """Deliver all new events. A new receiver gets only events from now on.

        Raises: ConfigError; the errors of a fault of the machine.
        """
        policy = NotificationPolicy.load(self.workspace.policy_path("notifications.yaml"))
        wanted = make_receivers(policy, self.workspace.root)
        positions = _positions(self.workspace)
        if not wanted and not positions:
            return
        if self._backoff is None:
            self._backoff = FailureWaits(policy.first_wait_seconds, policy.longest_wait_seconds)
        kept = {name: positions[name] for name in wanted if name in positions}
        self._looked_at = {name: event for name, event in self._looked_at.items() if name in kept}
        newest = self._newest() if wanted.keys() - kept.keys() else {}
        kept |= {name: newest for name in wanted if name not in kept}
        if kept != positions:
            self._write(kept)
        for name, receiver in wanted.items():
            if not self._backoff.is_waiting(name):
                self._serve(name, receiver, policy, kept)

    def _serve(self, name: str, receiver: Receiver, policy: NotificationPolicy, positions: dict[str, Any]) -> None:
        assert self._backoff is not None
        since = self._looked_at.get(name) or self._since(positions[name])
        sql = "SELECT id, at, kind, subject, detail FROM events WHERE id > :since ORDER BY id LIMIT :most"
        while events := self.ledger.read(sql, since=since, most=EVENTS_AT_ONCE):
            for event in events:
                message = make_notification_of_event(Plant(self.workspace, self.ledger), event)
                if message is None or not set(message.kinds) & set(policy.kinds):
                    since = self._looked_at[name] = event["id"]
                    continue
                try:
                    receiver.deliver(message.to_json(self.workspace))
                except NotDeliveredError as error:
                    rest, news = self._backoff.record_failure(name, str(error))
                    positions[name] |= {"failing": str(error), "failures": rest.failures}
                    self._write(positions)
                    if news:
                        failed = Message(
                            "notifications.failed",
                            "  A notification to {receiver} failed: {reason}. The factory sends event {event} again in {wait}.",
                            receiver=name,
                            reason=error,
                            event=event["id"],
                            wait=format_duration(rest.seconds),
                        )
                        self.progress.line(failed)
                    return
                positions[name] = {"event": event["id"], "at": event["at"]}
                self._write(positions)
                since = self._looked_at[name] = event["id"]
                if self._backoff.record_success(name):
                    self.progress.line(
                        Message("notifications.works_again", "  Notifications to {receiver} work again.", receiver=name)
                    )

    def _newest(self) -> dict[str, Any]:
        rows = self.ledger.read("SELECT id, at FROM events ORDER BY id DESC LIMIT 1")
        return {"event": rows[0]["id"], "at": rows[0]["at"]} if rows else {"event": 0, "at": 0.0}

    def _since(self, position: dict[str, Any]) -> int:
        """The number of the newest delivered event. In a restored ledger the numbers may differ, so the event is then found by its time."""
        known = self.ledger.read("SELECT at FROM events WHERE id = :id", id=position["event"])
        if position["event"] == 0 or (known and known[0]["at"] == position["at"]):
            return int(position["event"])
        sql = "SELECT COALESCE(MAX(id), 0) AS id FROM events WHERE at <= :at"
        return int(self.ledger.read(sql, at=position["at"])[0]["id"])

    def _write(self, positions: dict[str, Any]) -> None:
        write_atomically(self.workspace.root / FILE, json.dumps(positions, indent=2))


def _positions(workspace: Workspace) -> dict[str, Any]:
    found = read_delivery_positions(workspace)
    if found is None:
        path = workspace.root / FILE
        raise ConfigError(
            "notifications.unread_positions",
            "{file} cannot be read. Remove the file. After that, receivers get only new events.",
            file=path,
        )
    return found
