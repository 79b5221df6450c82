"""Runs lm-eval on a task file in the sandbox: ``python -I lm_eval_task.py FOLDER TASK.yaml CLUSTER_BY``. Imports nothing of the factory.

The model is outside the sandbox. Each request to lm-eval's ``LM`` is written to FOLDER/ask-N.json, and its answer is read from
FOLDER/answer-N.json. At the end, FOLDER/result.json has each item's numbers and lm-eval's own totals.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import sys
import time
from typing import Any

WAIT_SECONDS = 0.02


def main(folder: str, task_file: str, cluster_by: str) -> None:
    os.environ.update(
        HF_HOME=os.path.join(folder, "home"), HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_EVALUATE_OFFLINE="1",
        HF_DATASETS_DISABLE_PROGRESS_BARS="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1",
    )  # fmt: skip
    import numpy as np
    from lm_eval.api.model import LM
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    class Outside(LM):  # type: ignore[misc]
        """Asks the process outside the sandbox."""

        asked = 0

        def _ask(self, kind: str, requests: list[Any]) -> list[Any]:
            self.asked += 1
            write_json(
                folder, f"ask-{self.asked}.json", {"kind": kind, "requests": [list(one.args) for one in requests]}
            )
            path = os.path.join(folder, f"answer-{self.asked}.json")
            while not os.path.exists(path):
                time.sleep(WAIT_SECONDS)
            with open(path, encoding="utf-8") as file:
                found: list[Any] = json.load(file)
            return found

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return [(value, likeliest) for value, likeliest in self._ask("loglikelihood", requests)]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return self._ask("loglikelihood_rolling", requests)

        def generate_until(self, requests: list[Any]) -> list[str]:
            return self._ask("generate_until", requests)

    loaded = TaskManager(include_defaults=False).load([task_file])
    # The same seeds as lm-eval's own command, for examples, sampling and standard errors.
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    found = evaluate(lm=Outside(), task_dict=loaded, log_samples=True)
    [(name, samples)] = found["samples"].items()
    items = []
    for sample in samples:
        refuse_unanswered(loaded["tasks"][name], sample)
        document = sample["doc"] if isinstance(sample["doc"], dict) else {}
        items.append(
            {
                "item": sample["doc_id"],
                "id": document.get("id"),
                "cluster": str(document[cluster_by]) if cluster_by else hash_document(document),
                "filter": sample.get("filter", "none"),
                "values": {
                    metric: value
                    for metric in sample["metrics"]
                    if (value := pair_value_with_weight(metric, sample[metric]))
                },
            }
        )
    better = found["higher_is_better"].get(name, {})
    totals = {key: value for key, value in found["results"][name].items() if isinstance(value, int | float)}
    write_json(
        folder,
        "result.json",
        {"items": items, "higher_is_better": better, "totals": {k: v for k, v in totals.items() if math.isfinite(v)}},
    )


def hash_document(document: dict[str, Any]) -> str:
    """A hash of a document without its id, so that copies count as one cluster. Empty if the document is not an object."""
    rest = {key: value for key, value in document.items() if key != "id"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, default=repr).encode()).hexdigest() if rest else ""


def refuse_unanswered(task: Any, sample: Any) -> None:
    """Exit if an item has no valid answer, because lm-eval would count it as wrong."""
    target = sample["target"]
    wanted = target if isinstance(target, list) else [target]
    if task.OUTPUT_TYPE == "multiple_choice" and not task.multiple_input:
        choices = task.doc_to_choice(sample["doc"])
        known = [one in choices if isinstance(one, str) else 0 <= one < len(choices) for one in wanted]
    else:
        known = [str(one).strip() not in ("", "None") for one in wanted]
    if not wanted or not all(known):
        raise SystemExit(f"document {sample['doc_id']} has no answer among its choices: {str(target)[:80]!r}")


def pair_value_with_weight(metric: str, value: Any) -> list[float] | None:
    """[value, weight] of an item, such that the metric is the sum of values over the sum of weights. None for any other metric."""
    if metric == "bits_per_byte":
        return [-value[0] / math.log(2), float(value[1])]
    if metric == "perplexity":
        return [-float(value), 1.0]
    return [float(value), 1.0] if isinstance(value, int | float) else None


def write_json(folder: str, name: str, value: Any) -> None:
    """Write a JSON file, and then an empty file FILE.whole that marks it as complete."""
    path = os.path.join(folder, name)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file)
    open(path + ".whole", "w").close()


if __name__ == "__main__":
    main(*sys.argv[1:])
