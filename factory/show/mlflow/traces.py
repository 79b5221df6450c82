"""A trace of each exchange with a language model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from factory.ledger.ledger import exchanges
from factory.ledger.plant import Plant
from factory.show.mlflow.runs import Tracking


def make_trace(plant: Plant, tracking: Tracking, row: dict[str, Any]) -> None:
    """``row``: of the ledger's exchanges. Raises: TrackingError."""
    try:
        stored = json.loads(Path(row["file"]).read_text())
    except (OSError, ValueError) as error:
        plant.say(f"  exchange {row['id']} has no trace in MLflow: {row['file']}: {error}")
        return _settle(plant, row, "")
    trace = tracking.exchange_trace(
        stored["label"], stored["request"], stored["reply"], (stored["input_tokens"], stored["output_tokens"]),
        stored["usd"], stored["began"], stored["ended"],
        {"run": str(row["run"]), "exchange": str(row["id"]), "endpoint": stored["endpoint"]},
    )  # fmt: skip
    return _settle(plant, row, trace)


def _settle(plant: Plant, row: dict[str, Any], trace: str) -> None:
    with plant.ledger.begin() as tx:
        tx.execute(exchanges.update().where(exchanges.c.id == row["id"]).values(trace=trace))
