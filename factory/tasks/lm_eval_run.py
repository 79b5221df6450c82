"""Runs lm-eval on a task file in the sandbox and answers its requests to the model.

lm-eval, its templates and the functions of a task file are not trusted. They have no network, and their output is read as untrusted input.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from factory.core.untrusted_trainer_files import open_regular_file
from factory.evals.tasks import EvalItem
from factory.sandbox import sandbox
from factory.sandbox.sandbox import SandboxLimits, SandboxResult
from factory.tasks.answer_generation import hash_to_seed
from factory.tasks.items import TaskError
from factory.tasks.lm_eval_file import LmEvalFile
from factory.tasks.model import Advance, GenerationParameters, TaskModel
from factory.tasks.policy import TasksPolicy
from factory.tasks.task_file import EvalTask
from kernels.contract.files import write_atomically

INSIDE = Path(__file__).with_name("inside") / "lm_eval_task.py"
LARGEST = 1 << 30  # bytes of a request
LOOK_SECONDS = 0.05
MAX_TOKENS = 256  # lm-eval's default
# The known keys of generation_kwargs. Other keys have no effect without sampling, and are refused with sampling.
DRAWING = {"until", "do_sample", "temperature", "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"}


def run_lm_eval(
    task: EvalTask, model: TaskModel, policy: TasksPolicy, advance: Advance
) -> tuple[list[EvalItem], dict[str, Any]]:
    """(an item for each metric and filter, {lm-eval's own totals, names of metrics that are costs}).

    Raises: TaskError if lm-eval fails, or if its request or result is invalid; IsolationError without a sandbox.
    """
    assert isinstance(task.file, LmEvalFile)
    with tempfile.TemporaryDirectory(prefix="factory-lm-eval-") as name, ThreadPoolExecutor(1) as pool:
        folder, enough = Path(name), threading.Event()
        ended = pool.submit(_start, folder, task, policy, enough)
        try:
            _answer(folder, ended, model, advance)
        finally:
            enough.set()
        result = ended.result()
        if not result.ok:
            raise TaskError("lm_eval_run.failed", "lm-eval failed: {reason}", reason=result.describe_ending())
        found = _read(folder / "result.json")
    return _items(task, found)


def _start(folder: Path, task: EvalTask, policy: TasksPolicy, enough: threading.Event) -> SandboxResult:
    assert isinstance(task.file, LmEvalFile)
    running = policy.running
    path = task.path.resolve()
    if task.file.shipped:
        over = json.loads(task.file.shipped)
        path = folder / "task.yaml"
        path.write_text(json.dumps(over | {"include": [*over["include"], str(task.path.resolve())]}))
    return sandbox.run_in_sandbox(
        [sys.executable, "-I", str(INSIDE), str(folder), str(path), task.file.cluster_by],
        output=folder,
        readonly=[INSIDE, task.path.resolve().parent],
        cwd=task.path.resolve().parent,
        limits=SandboxLimits(
            wall_seconds=running.lm_eval_seconds, memory=running.lm_eval_memory_mib << 20, output=4 << 30
        ),
        enough=enough,
    )


def _answer(folder: Path, ended: Future[SandboxResult], model: TaskModel, advance: Advance) -> None:
    """Answer lm-eval's requests, one after the other, until lm-eval ends."""
    number = 1
    while not ended.done():
        asked = folder / f"ask-{number}.json"
        if not asked.with_name(f"{asked.name}.whole").exists():
            wait([ended], LOOK_SECONDS)
            continue
        answer = answer_lm_eval_request(_read(asked), model, advance)
        write_atomically(folder / f"answer-{number}.json", json.dumps(answer))
        number += 1


def answer_lm_eval_request(request: Any, model: TaskModel, advance: Advance) -> list[Any]:
    """The answer to a request of lm-eval's ``LM``. Raises: TaskError for an invalid request."""
    kind, requests = (request.get("kind"), request.get("requests")) if isinstance(request, dict) else (None, None)
    if not isinstance(requests, list) or not all(isinstance(one, list) and one for one in requests):
        raise TaskError("lm_eval_run.no_requests", "lm-eval asked for something other than a list of requests")
    texts_of = {"loglikelihood": 2, "loglikelihood_rolling": 1, "generate_until": 1}.get(str(kind), 0)
    if not texts_of or not all(isinstance(part, str) for one in requests for part in one[:texts_of]):
        raise TaskError(
            "lm_eval_run.odd_request", "lm-eval made an invalid request of kind {kind!r}", kind=str(kind)[:40]
        )
    if kind == "loglikelihood":
        scored = model.score_continuations([(one[0], one[1]) for one in requests], advance)
        return [[one.log_probability, one.likeliest] for one in scored]
    if kind == "loglikelihood_rolling":
        return model.score_whole_texts([one[0] for one in requests], advance)
    found: list[str] = [""] * len(requests)
    by_drawing: dict[GenerationParameters, list[int]] = {}
    for index, one in enumerate(requests):
        by_drawing.setdefault(_drawing(one[1] if len(one) > 1 else {}), []).append(index)
    for how, indices in by_drawing.items():
        seeds = [hash_to_seed(index, requests[index][0]) for index in indices]
        for index, one in zip(indices, model.generate([requests[i][0] for i in indices], how, seeds, advance)):
            found[index] = one.text
    return found


def _drawing(said: Any) -> GenerationParameters:
    if not isinstance(said, dict):
        raise TaskError(
            "lm_eval_run.no_generation_kwargs", "lm-eval asked the model for texts but gave no generation_kwargs"
        )
    until = said.get("until") or []
    until = [until] if isinstance(until, str) else until
    lengths = [
        said[key] for key in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens") if said.get(key)
    ]
    length, temperature = (lengths or [MAX_TOKENS])[0], said.get("temperature") or 0.0
    if not isinstance(length, int) or not isinstance(until, list) or not all(isinstance(w, str) and w for w in until):
        raise TaskError(
            "lm_eval_run.odd_generation_kwargs", "generation_kwargs is invalid: {given}", given=str(said)[:200]
        )
    if not isinstance(temperature, int | float) or not 0 <= temperature <= 10:
        raise TaskError(
            "lm_eval_run.temperature",
            "generation_kwargs: temperature {given} is not a number from 0 to 10",
            given=str(temperature)[:40],
        )
    drawn = bool(said.get("do_sample")) and temperature > 0
    if drawn and (unknown := sorted(set(said) - DRAWING)):
        raise TaskError("lm_eval_run.unknown_generation_key", "generation_kwargs: unknown key {key}", key=unknown[0])
    return GenerationParameters(length, tuple(until), float(temperature) if drawn else 0.0)


def _items(task: EvalTask, found: Any) -> tuple[list[EvalItem], dict[str, Any]]:
    try:
        rows = [row for sample in found["items"] for row in _rows(task.name, sample)]
        better = {str(name): bool(up) for name, up in found["higher_is_better"].items()}
        totals = {str(key): float(value) for key, value in found["totals"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TaskError(
            "lm_eval_run.odd_result", "lm-eval's result is invalid: {reason}", reason=str(error)[:200]
        ) from None
    if not rows:
        raise TaskError(
            "lm_eval_run.no_metric",
            "lm-eval gave no metric with a number for each item, so candidates cannot be compared",
        )
    doubled = [key for key, count in Counter((row.task, row.item) for row in rows).items() if count > 1]
    if doubled:
        raise TaskError(
            "lm_eval_run.item_twice",
            "lm-eval measured item {item!r} twice. Give each item its own id",
            item=doubled[0][1],
        )
    broken = [row for row in rows if not math.isfinite(row.value)]
    if broken:
        raise TaskError(
            "lm_eval_run.not_finite", "{count:,} of {values:,} values are not finite. First: metric {metric} of item {item}",
            count=len(broken), values=len(rows), metric=broken[0].task, item=broken[0].item,
        )  # fmt: skip
    costs = [row.task for row in rows if not better.get(row.task.split("/", 1)[1].split(",")[0], True)]
    return rows, {"totals": totals, "costs": sorted(set(costs))}


def _rows(name: str, sample: Any) -> Sequence[EvalItem]:
    rows = []
    number = str(int(sample["item"]))
    key = number if sample["id"] is None else str(sample["id"])[:200]
    for metric, (value, weight) in sample["values"].items():
        measure = metric if sample["filter"] == "none" else f"{metric},{sample['filter']}"
        rows.append(
            EvalItem(
                f"{name}/{measure}"[:200], key, name, str(sample["cluster"])[:200] or key, float(value), float(weight)
            )
        )
    return rows


def _read(path: Path) -> Any:
    try:
        with open_regular_file(path) as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise TaskError(
                "lm_eval_run.too_large", "lm-eval wrote a file of more than {limit:,} MiB", limit=LARGEST >> 20
            )
        return json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise TaskError(
            "lm_eval_run.unreadable", "lm-eval's output cannot be read: {reason}", reason=str(error)[:200]
        ) from error
