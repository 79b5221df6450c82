"""Sends training metrics to MLflow: reads new lines of a ``metrics.jsonl`` and logs each step once."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from factory.core.untrusted_trainer_files import LINE_BYTES, open_regular_file, parse_json
from factory.core.workspace import Workspace
from factory.show.mlflow.outages import show_unless_outage
from factory.show.mlflow.store import check_store_writable, convert_mlflow_errors

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

LATEST_SECONDS = 1e12  # tens of thousands of years
# MLflow sorts charts by the part of a metric's name before the last '/'. Names without '/' come last.
PER_LAYER = ("grad_norm/", "update_ratio/", "activation_max/", "attention_logit_max/", "router_balance/")
LOSS = "loss/all"
# The metrics of an evaluation that decide a verdict. MLflow's tables of a run and of a comparison show them in this order.
DECIDING_METRICS = ("bpb/", "cloze/share_right", "cloze/by_domain/", "chat/", "dev/bpb/")
METRICS_PER_BATCH = 1000  # MLflow's own limit
METRICS_OF_STEP = 10_000  # most metrics of one step that are logged
BYTES_AT_ONCE = 16 << 20  # about the most bytes that one call of ``poll`` reads


class MetricsFollower:
    """Sends the lines of one ``metrics.jsonl`` to one run. Call ``poll()`` every few seconds while the trainer writes.

    Each step is logged once: steps up to the run's highest step are skipped. So nothing is logged twice after a restart of the factory, or when
    a resumed trainer has cut the file and written on.
    """

    def __init__(
        self,
        workspace: Workspace,
        client: Callable[[], MlflowClient],
        path: Path,
        run: Callable[[], str],
        say: Callable[[str], None],
        close: Callable[[], None],
    ) -> None:
        self.path = path
        self.last_step: int | None = None  # highest step that the run has; None before the run is read
        self._workspace, self._client, self._run_of, self._say, self._close = workspace, client, run, say, close
        self._run: str | None = None
        self._offset = 0  # bytes of whole lines that are in MLflow
        self._tail = b""  # the last of these bytes, to notice a rewritten file

    def make_run(self) -> None:
        """Make the run before the first metrics, so that the ledger knows it. Like ``poll``, raises nothing."""
        self._without_raising(self._begin)

    def poll(self) -> int:
        """Log the whole lines that were added since the last poll; returns the number of logged steps.

        Raises nothing when MLflow is locked or away: prints that once, and the next poll tries the same lines again.
        """
        return self._without_raising(self._poll)

    def finish(self) -> None:
        """Poll a last time and close the run. Like ``poll``, raises nothing."""
        self.poll()
        self._without_raising(self._finish)

    def _without_raising(self, act: Callable[[], int]) -> int:
        return show_unless_outage(self._say, act) or 0

    def _finish(self) -> int:
        check_store_writable(self._workspace)
        self._close()
        return 0

    def _poll(self) -> int:
        logged, began = 0, self._offset
        while self._offset < began + BYTES_AT_ONCE and (lines := self._new_lines()):
            self._begin()
            logged += self._log(lines)
        return logged

    def _begin(self) -> int:
        check_store_writable(self._workspace)
        if self._run is None:
            run = self._run_of()
            self.last_step = self._highest_step(run)
            self._run = run
        return 0

    def _new_lines(self) -> list[bytes]:
        """The next whole lines after the offset, with their newlines. A half-written last line is left for the next poll.

        A line of more than ``LINE_BYTES`` is passed over in pieces, none of which is JSON.
        """
        try:
            with open_regular_file(self.path) as file:
                file.seek(self._offset - len(self._tail))
                if file.read(len(self._tail)) != self._tail:
                    self._offset, self._tail = 0, b""
                    file.seek(0)
                data = file.read(LINE_BYTES)
        except FileNotFoundError:
            return []
        whole = data if len(data) == LINE_BYTES and b"\n" not in data else data[: data.rfind(b"\n") + 1]
        if b'"step"' not in whole:  # no metrics: it counts as one line, since millions of empty ones would take long
            return [whole] if whole else []
        return whole.splitlines(keepends=True)

    def _log(self, lines: list[bytes]) -> int:
        from mlflow.entities import Metric

        batch: list[Metric] = []
        logged, steps, consumed = 0, 0, 0
        assert self.last_step is not None
        newest = self.last_step
        for index, line in enumerate(lines):
            consumed += len(line)
            row = _parse(line)
            if row is not None and row["step"] > newest:
                newest = row["step"]
                at = _milliseconds(row.get("time"))
                values = rename_training_metrics(
                    flatten_numbers({k: v for k, v in row.items() if k not in ("step", "time")})
                )
                batch += [Metric(key, value, at, newest) for key, value in islice(values.items(), METRICS_OF_STEP)]
                steps += 1
            room = METRICS_PER_BATCH - len(batch)
            if index == len(lines) - 1 or room < 64:
                with convert_mlflow_errors("logging metrics"):
                    for start in range(0, len(batch), METRICS_PER_BATCH):
                        self._client().log_batch(str(self._run), metrics=batch[start : start + METRICS_PER_BATCH])
                self._offset, self._tail, self.last_step = self._offset + consumed, line[-256:], newest
                logged, steps, consumed, batch = logged + steps, 0, 0, []
        return logged

    def _highest_step(self, run: str) -> int:
        with convert_mlflow_errors("reading a run's metrics"):
            return max((point.step for point in self._client().get_metric_history(run, LOSS)), default=-1)


def flatten_numbers(tree: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Every number in nested mappings, under a key that MLflow accepts: ``{"bpb": {"code": 1.5}}`` → ``{"bpb/code": 1.5}``.

    Names come from data (domains, rules) and are cleaned. Text, lists and nulls are left out. A boolean becomes 0 or 1.
    """
    flat: dict[str, float] = {}
    for key, value in tree.items():
        name = clean_metric_key(f"{prefix}{key}")
        if isinstance(value, Mapping):
            flat.update(flatten_numbers(value, f"{name}/"))
        elif isinstance(value, int | float):
            flat[name] = float(value)
    return flat


def rename_training_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Rename a step's metrics so that MLflow's charts begin with the loss, in total and by domain, and end with single layers.

    >>> rename_training_metrics({"loss": 2.0, "loss/code": 2.0, "grad_norm": 1.0, "grad_norm/head": 0.5})
    {'loss/all': 2.0, 'loss/code': 2.0, 'overall/grad_norm': 1.0, 'per_layer/grad_norm/head': 0.5}
    """
    return {_of_training(key)[:250]: value for key, value in values.items()}


def _of_training(key: str) -> str:
    if key == "loss":
        return LOSS
    return f"per_layer/{key}" if key.startswith(PER_LAYER) else key if "/" in key else f"overall/{key}"


def rename_evaluation_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Order an evaluation's metrics: the deciding ones first, the rest under ``details/``.

    >>> rename_evaluation_metrics({"seconds/bpb": 3.0, "cloze/share_right": 0.3, "bpb/code": 2.0})
    {'bpb/code': 2.0, 'cloze/share_right': 0.3, 'details/seconds/bpb': 3.0}
    """
    first = {key: value for start in DECIDING_METRICS for key, value in values.items() if key.startswith(start)}
    return first | {f"details/{key}"[:250]: value for key, value in values.items() if key not in first}


def clean_metric_key(name: str) -> str:
    """``name`` as a metric key that MLflow accepts: letters, digits, ``_-. :/``, a clean relative path, at most 250 characters."""
    clean = posixpath.normpath(re.sub(r"[^\w\-. :/]", "_", name))
    return re.sub(r"^[./]+", "_", clean)[:250]


def _parse(line: bytes) -> dict[str, Any] | None:
    """One row of metrics, or None for an invalid line, such as a torn write."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _milliseconds(seconds: Any) -> int:
    """Seconds as milliseconds; 0 for a value that does not fit MLflow's 64 bits."""
    return int(seconds * 1000) if isinstance(seconds, int | float) and 0 <= seconds < LATEST_SECONDS else 0
