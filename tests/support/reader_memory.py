"""Measures, in a process of its own, how much the peak of resident memory grows while a reader reads what untrusted code left."""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.paths import ROOT

MIB = 1 << 20


def measure_growth(reader: str, folder: Path, files: Mapping[str, bytes]) -> dict[str, tuple[float, str]]:
    """Read each of ``files`` (kind → content) with one reader. Returns, for each kind, the MiB by which the peak grew over all files so far, and ''
    or the name of the error with which the reader refused the file.
    """
    for kind, content in files.items():
        (folder / kind).write_bytes(content)
    words = [sys.executable, "-m", "tests.support.reader_memory", reader, str(folder), *files]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {kind: (grown / MIB, error) for kind, (grown, error) in found.items()}


def _read_step_lines(folder: Path) -> object:
    from factory.runs.trace import read_step_lines

    return read_step_lines(folder, "metrics.jsonl")


def _trace(folder: Path) -> object:
    from factory.runs.trace import RunTrace

    trace = RunTrace(folder, 0, 1 << 40)
    return trace.metric_lines_by_step, trace.anomalies


def _anomalies(folder: Path) -> object:
    from factory.training.segment_folder import read_anomalies

    return read_anomalies(folder, SimpleNamespace(first_step=0, last_step=1 << 40))  # type: ignore[arg-type]


def _data_metrics(folder: Path) -> object:
    from factory.data.metrics import read_metrics

    return read_metrics(SimpleNamespace(folder=str(folder), first_step=0, last_step=1 << 40))  # type: ignore[arg-type]


def _follower(folder: Path) -> object:
    from factory.show.mlflow.metrics_follower import MetricsFollower

    client: Any = SimpleNamespace(get_metric_history=lambda *a: [], log_batch=lambda *a, **k: None)
    follower = MetricsFollower(None, lambda: client, folder / "metrics.jsonl", str, print, int)  # type: ignore[arg-type]
    follower.last_step, follower._run = -1, "run"
    follower._begin = lambda: 0  # type: ignore[method-assign]
    return follower._poll()


def _picture(folder: Path) -> object:
    from factory.show.pages.release_pictures import _metrics

    return _metrics(folder / "metrics.jsonl")


def _last_metrics(folder: Path) -> object:
    from factory.training.training import read_last_metrics

    return read_last_metrics(folder / "metrics.jsonl")


def _result(folder: Path) -> object:
    from factory.runs.trainer_folder import read_result

    return read_result(folder, 1)


def _profile(folder: Path) -> object:
    from factory.core.untrusted_trainer_files import read_json_object

    return read_json_object(folder / "profile.json")


def _state(folder: Path) -> object:
    from trainer.contract.checkpoint.format import read_checkpoint_state

    return read_checkpoint_state(folder)


def _manifest(folder: Path) -> object:
    from trainer.contract.checkpoint.format import read_manifest

    return read_manifest(folder)


def _live_state(folder: Path) -> object:
    import os

    from factory.runs.untrusted_files import read_untrusted_json_object

    return read_untrusted_json_object(os.open(folder, os.O_RDONLY), ["state.json"], 1 << 26)


def _executed(folder: Path) -> object:
    import os

    from factory.gates.patch.op_answers import read_executed_code

    return read_executed_code(os.open(folder, os.O_RDONLY))


# reader → (function, the file that it reads)
READERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "step lines": (_read_step_lines, "metrics.jsonl"),
    "trace of a run": (_trace, "metrics.jsonl"),
    "anomalies of a segment": (_anomalies, "anomalies.jsonl"),
    "metrics of exposure and curves": (_data_metrics, "metrics.jsonl"),
    "metrics for MLflow": (_follower, "metrics.jsonl"),
    "pictures of a release": (_picture, "metrics.jsonl"),
    "progress": (_last_metrics, "metrics.jsonl"),
    "result": (_result, "result.json"),
    "profile": (_profile, "profile.json"),
    "state of a checkpoint": (_state, "state.json"),
    "manifest": (_manifest, "manifest.json"),
    "state of a live checkpoint": (_live_state, "state.json"),
    "executed code": (_executed, "executed.json"),
}


def main() -> None:
    (read, name), folder, kinds = READERS[sys.argv[1]], Path(sys.argv[2]), sys.argv[3:]
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (folder / name).write_text('{"step": 1}\n')
    with contextlib.suppress(Exception):  # imports, and what a first call keeps
        read(folder)
    before, found = peak(), {}
    for kind in kinds:
        (folder / kind).rename(folder / name)
        error = ""
        try:
            read(folder)
        except Exception as raised:
            error = type(raised).__name__
        found[kind] = (peak() - before, error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
