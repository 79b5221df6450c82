"""The factory's and lm-eval's multiple choice equal, item by item, lm-eval with its own Hugging Face model on the same export."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from factory.tasks.lm_eval_run import answer_lm_eval_request, run_lm_eval
from factory.tasks.model import ContinuationScore, TaskModel
from factory.tasks.multiple_choice import score_choices
from factory.tasks.policy import TasksPolicy
from factory.tasks.task_file import load_task
from tests.support.factory.exports import FilledPlant
from tests.support.factory.task_files import LM_EVAL, choice_items, write_lm_eval_task, write_task

POLICY = TasksPolicy()


def with_its_own_model(export: Path, tasks: list[Path]) -> dict[str, list[dict[str, Any]]]:
    """The samples of each task, by lm-eval alone."""
    pytest.importorskip("lm_eval")
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    before = os.getcwd()
    os.chdir(tasks[0].parent)  # data files are looked for in the current folder
    try:
        loaded = TaskManager(include_defaults=False).load([str(path) for path in tasks])
        model = HFLM(pretrained=str(export), device="cpu", dtype="float32", batch_size=4)
        return dict(evaluate(lm=model, task_dict=loaded, bootstrap_iters=0)["samples"])
    finally:
        os.chdir(before)


@pytest.mark.slow("lm-eval, twice")
def test_scores_equal_those_of_lm_eval_with_its_own_model(
    plant: FilledPlant, export: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    items = choice_items(24)
    shown = [{**item, "question": f"{item['question']} It is spelt {'so ' * 200}"} for item in items[:8]]  # too long
    names = {"cloze": items, "letter": items, "long": shown}
    files = {
        name: write_lm_eval_task(
            plant.workspace, f"theirs_{name}", of, **LM_EVAL["letter" if name == "letter" else "cloze"]
        )
        for name, of in names.items()
    }
    theirs = with_its_own_model(export, list(files.values()))
    right = {}
    for name, of in names.items():
        model = TaskModel.load(export, plant.tokenizer, 2048, "cpu")
        written = write_task(plant.workspace, f"ours_{name}", of, format="letter" if name == "letter" else "cloze")
        ours = score_choices(load_task(written, POLICY), model, lambda n: None)
        assert (model.cut_contexts > 0) == (name == "long")
        expected = {
            (metric, f"q{sample['doc_id']}"): float(sample[metric])
            for sample in theirs[f"theirs_{name}"]
            for metric in sample["metrics"]
        }
        assert len(expected) == len(of) * (1 if name == "letter" else 2)
        assert {(row.task.split("/")[1], row.item): row.value for row in ours} == expected
        right[name] = sum(row.value for row in ours) / len(ours)
        if name == "cloze":
            run, _ = run_lm_eval(load_task(files[name], POLICY), model, POLICY, lambda n: None)
            assert {(row.task.split("/")[1], row.item): row.value for row in run} == expected
    assert 0 < right["cloze"] < 1


def test_log_probabilities_equal_those_of_lm_eval(plant: FilledPlant, export: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    long = "def f(x):\n    return x + 1\n" * 60
    pairs = [
        ("def f", "(x): return x"),
        ("", "import os"),
        ("x = 1 ", "+ 2"),
        (long, "def g(x):"),
        ("a\n\n", "b"),
        ("é", "ü"),
    ]
    theirs = HFLM(pretrained=str(export), device="cpu", dtype="float32", batch_size=2)
    ours = TaskModel.load(export, plant.tokenizer, 1024, "cpu")
    ask = lambda kind, args: [Instance(kind, {}, one, index) for index, one in enumerate(args)]
    expected = theirs.loglikelihood(ask("loglikelihood", pairs), disable_tqdm=True)
    found = ours.score_continuations(pairs, lambda n: None)
    assert [one.log_probability for one in found] == pytest.approx([value for value, _ in expected], abs=1e-3)
    assert [one.likeliest for one in found] == [likeliest for _, likeliest in expected]
    assert ours.cut_contexts == 1
    texts = [long, "import os", "x"]
    rolled = theirs.loglikelihood_rolling(ask("loglikelihood_rolling", [(text,) for text in texts]), disable_tqdm=True)
    assert ours.score_whole_texts(texts, lambda n: None) == pytest.approx(rolled, rel=1e-4)
    asked = [(text, {"until": [")", "\n\n"], "max_gen_toks": 40}) for text in ("def f(", "import", long)]
    drawn = theirs.generate_until(ask("generate_until", asked), disable_tqdm=True)
    assert (
        answer_lm_eval_request(
            {"kind": "generate_until", "requests": [list(one) for one in asked]}, ours, lambda n: None
        )
        == drawn
    )
    assert any(drawn)


@pytest.mark.parametrize("format", ["cloze", "letter"])
def test_choices_with_equal_highest_log_probability_share_the_point(plant: FilledPlant, format: str) -> None:
    """A model that tells none apart scores chance wherever the right ones stand, also at the first place."""
    items = [{**item, "answer": 0} for item in choice_items(12)]
    task = load_task(write_task(plant.workspace, "ties", items, format=format), POLICY)

    class Same:
        def score_continuations(self, pairs: Sequence[tuple[str, str]], advance: Any) -> list[ContinuationScore]:
            return [ContinuationScore(self.values[at % 4], False) for at in range(len(pairs))]

        def __init__(self, *values: float) -> None:
            self.values = values

    score = lambda *values: {
        row.value for row in score_choices(task, Same(*values), lambda n: None) if row.task == "ties/acc"
    }
    assert score(-3, -3, -3, -3) == {0.25} and score(-3, -3, -5, -5) == {0.5}
    assert score(-3, -4, -5, -3.5) == {1.0} and score(-3, -2, -2, -5) == {0.0}
    normed = [row.value for row in score_choices(task, Same(0, 0, 0, 0), lambda n: None) if row.task == "ties/acc_norm"]
    assert normed == ([0.25] * 12 if format == "cloze" else [])
