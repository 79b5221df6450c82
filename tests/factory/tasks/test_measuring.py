"""A measured task is recorded with its items and its scores with clustered errors. Nothing is recorded that was not measured."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
import torch

from factory.core.errors import DamagedExportError, InputError
from factory.evals.tasks import EvalItem
from factory.gates.release.judge import judge
from factory.gates.release.policy import ReleasePolicy
from factory.ingest.hash_index import HashedDocument, write_hashes
from factory.ledger.ledger import eval_items, evaluations, record_event
from factory.ledger.rows import EvaluationRow
from factory.tasks.comparing import (
    TaskEvidence,
    compute_item_counts_and_variances,
    compute_metric_gains,
    compute_metric_scores,
    find_unreliable_metrics,
    make_task_reasons,
)
from factory.tasks.items import TaskError
from factory.tasks.measuring import find_contaminated_items, measure_task
from factory.tasks.policy import TasksPolicy
from factory.tasks.task_file import load_task
from tests.support.factory import published_files as published
from tests.support.factory.exports import FilledPlant, save_export, tiny_model
from tests.support.factory.task_files import choice_items, programs, sums, write_lm_eval_task, write_task
from tests.support.gates.reasons import expect, tells
from tests.support.gates.release_evidence import evidence
from tests.support.messages import refused, says, the, tree

POLICY = TasksPolicy()


@pytest.fixture(scope="module")
def candidate(plant: FilledPlant, export: Path) -> int:
    return plant.add_candidate(export)


def recorded(plant: FilledPlant) -> int:
    return len(plant.ledger.select_rows(sa.select(evaluations.c.id)))


def test_items_and_scores_are_recorded_once(plant: FilledPlant, candidate: int) -> None:
    items = [{**item, "source": f"module {number % 5}"} for number, item in enumerate(choice_items(20))]
    task = load_task(write_task(plant.workspace, "asked", items), POLICY)
    number = measure_task(plant, candidate, task, POLICY)
    assert measure_task(plant, candidate, task, POLICY) == number
    rows = plant.ledger.select_rows(sa.select(eval_items).where(eval_items.c.evaluation == number))
    assert {(row["task"], row["domain"]) for row in rows} == {("asked/acc", "asked"), ("asked/acc_norm", "asked")}
    assert len(rows) == 40 and {row["cluster"] for row in rows} == {f"module {n}" for n in range(5)}
    summary = EvaluationRow.get(plant.ledger, number).summary
    right = [row["value"] for row in rows if row["task"] == "asked/acc"]
    assert summary["metrics"]["asked/acc"]["value"] == pytest.approx(np.mean(right))
    assert (summary["items"], summary["clusters"], summary["format"]) == (
        20,
        5,
        "multiple choice in cloze format, 0 shots",
    )
    assert EvaluationRow.find_newest(plant.ledger, candidate) is None  # of held-out documents there is none
    other = load_task(write_task(plant.workspace, "asked", items[:-1]), POLICY)
    assert measure_task(plant, candidate, other, POLICY) != number


def test_the_standard_error_of_a_score_is_clustered() -> None:
    """Against a bootstrap of whole clusters; items alone would claim to know four times as much."""
    drawn = np.random.default_rng(0)
    rows, means = [], []
    for cluster in range(40):
        right = float(drawn.random() < 0.6)
        means.append(right)
        rows += [EvalItem("t/acc", f"{cluster}-{n}", "t", f"c{cluster}", right, 1.0) for n in range(16)]
    found = compute_metric_scores(rows)["t/acc"]
    spread = np.std([np.mean(drawn.choice(means, 40)) for _ in range(4000)])
    assert found.gain == pytest.approx(np.mean(means)) and found.clusters == 40
    assert found.error == pytest.approx(spread, rel=0.1)
    alone = compute_metric_scores([EvalItem(row.task, row.item, row.domain, row.item, row.value, 1.0) for row in rows])[
        "t/acc"
    ]
    assert alone.error is not None and found.error is not None and 3.5 < found.error / alone.error < 4.5


def test_a_lower_value_of_a_cost_metric_is_a_gain() -> None:
    ours = [EvalItem("t/bits_per_byte", str(n), "t", str(n), 90.0, 100.0) for n in range(9)]
    theirs = [EvalItem("t/bits_per_byte", str(n), "t", str(n), 100.0, 100.0) for n in range(9)]
    assert (compute_metric_gains(ours, theirs, ["t/bits_per_byte"]) or {})["t/bits_per_byte"].gain == pytest.approx(0.1)
    assert (compute_metric_gains(ours, theirs) or {})["t/bits_per_byte"].gain == pytest.approx(-0.1)
    assert compute_metric_gains(ours, theirs[1:]) is None and compute_metric_gains([], []) is None


def of_size(items: int, before: float, after: float, margin: float = 0.1) -> TaskEvidence:
    """A task on which the champion is right on the first share of its items, and the candidate on another, of the same order."""
    side = lambda share: [EvalItem("t/acc", str(n), "t", str(n), float(n < share * items), 1.0) for n in range(items)]
    found = compute_metric_gains(side(after), side(before))
    assert found is not None
    many, variances = compute_item_counts_and_variances(side(before))
    return TaskEvidence(gains=found, margins={"t/acc": margin}, items=many, variances=variances)


@pytest.mark.parametrize(
    ("items", "before", "after", "outcome", "code", "data"),
    [
        (40, 0.5, 0.55, "promote", "no_guard", {"items": 40, "limit": 20.0}),
        (40, 0.5, 0.425, "promote", "no_guard", {"items": 40, "limit": 20.0}),
        (40, 0.5, 0.35, "hold", "loss_measured", {"task": "t/acc", "margin": 0.1}),
        (40, 0.9, 0.3, "reject", "loss_shown", {"task": "t/acc", "margin": 0.1}),
        (400, 0.5, 0.5, "promote", "no_loss", {"task": "t/acc", "gain": 0.0}),
        (400, 0.5, 0.4, "hold", "loss_not_excluded", {"task": "t/acc", "margin": 0.1}),
        (4, 0.5, 0.75, "promote", "only_informs", {"groups": 4, "needed": 8}),
        (1, 1.0, 1.0, "promote", "only_informs", {"groups": 1, "needed": 8}),
    ],
)  # fmt: skip
def test_a_small_task_only_informs_and_a_large_task_is_a_guard(
    items: int, before: float, after: float, outcome: str, code: str, data: dict[str, Any]
) -> None:
    task = of_size(items, before, after)
    verdict = judge(ReleasePolicy(), evidence(), task)
    assert verdict.outcome == outcome
    assert any(says(reason, (f"comparing.{code}", data)) for reason in verdict.reasons), verdict.reasons
    to_do = expect("release.to_do", remedy="release.remedy_task_not_shown")
    assert (outcome == "hold") == tells(verdict.reasons[:1], to_do)


def test_a_task_of_the_size_named_in_the_message_is_a_guard() -> None:
    fact = make_task_reasons(of_size(40, 0.5, 0.55), 8).facts[0]
    needed = the(tree(fact), "comparing.items_needed").data["items"]
    assert find_unreliable_metrics(of_size(needed - 2, 0.5, 0.5), 8) and not find_unreliable_metrics(
        of_size(needed + 2, 0.5, 0.5), 8
    )


@pytest.mark.parametrize("after", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_a_candidate_s_answers_cannot_set_a_task_aside(after: float) -> None:
    hostile = of_size(400, 0.5, after)
    assert not find_unreliable_metrics(hostile, 8)
    wide = {name: replace(gain, error=9.0) for name, gain in hostile.gains.items()}
    assert not find_unreliable_metrics(replace(hostile, gains=wide), 8)
    for nothing in ({"items": {}}, {"variances": {}}, {"variances": {"t/acc": math.nan}}):
        unknown = replace(of_size(40, 0.5, after), **nothing)
        assert not find_unreliable_metrics(unknown, 8), "of unknown size it stands"
        assert len(make_task_reasons(unknown, 41).not_measured) == 1, "of too few groups"


def test_a_model_with_non_finite_scores_is_not_recorded(plant: FilledPlant, tmp_path: Path) -> None:
    huge = tiny_model(3, max_position_embeddings=256)
    with torch.no_grad():  # finite weights
        huge.model.norm.weight.fill_(3e38)
    overflow = plant.add_candidate(save_export(huge, tmp_path / "overflow", plant.tokenizer))
    before = recorded(plant)
    tasks = [
        write_task(plant.workspace, "asked", choice_items()),
        write_task(plant.workspace, "sums", sums(), kind="maths", max_tokens=4),
        write_task(plant.workspace, "code", programs(), kind="code", max_tokens=4, samples=2, temperature=1.0),
    ]
    for path in tasks:
        with refused("measuring.failed", TaskError, task=path.stem) as found:
            measure_task(plant, overflow, load_task(path, POLICY), POLICY)
        assert found.value.data["problem"].code == (
            "model.not_finite" if path.stem == "asked" else "model.logits_not_finite"
        )
    assert recorded(plant) == before


def test_a_task_that_cannot_be_measured_is_named_and_not_recorded(
    plant: FilledPlant, candidate: int, tmp_path: Path
) -> None:
    before = recorded(plant)
    long = [{**item, "choices": [*item["choices"][:3], "word " * 400], "answer": 0} for item in choice_items()]
    with refused("measuring.failed", TaskError, task="long") as found:
        measure_task(plant, candidate, load_task(write_task(plant.workspace, "long", long), POLICY), POLICY)
    assert says(found.value.message, ("model.long_answer", {"context": 256}))
    path = published.write(plant.workspace.root / "policies" / "tasks" / "HumanEval.jsonl", published.human_eval())
    with refused(
        "measuring.no_room", TaskError, task="HumanEval", published="humaneval", items="HumanEval.jsonl"
    ) as found:
        measure_task(plant, candidate, load_task(path, POLICY), POLICY)
    assert says(found.value.message, ("model.no_room", {"max_tokens": 1024, "context": 256}))
    with refused("measuring.failed", TaskError, task="room") as found:
        measure_task(
            plant, candidate, load_task(write_task(plant.workspace, "room", sums(), kind="maths"), POLICY), POLICY
        )
    assert says(found.value.message, ("model.no_room", {"max_tokens": 256, "context": 256}))
    task = load_task(write_task(plant.workspace, "asked", choice_items()), POLICY)
    with pytest.raises(InputError, match="no candidate 99"):
        measure_task(plant, 99, task, POLICY)
    changed = save_export(tiny_model(5), tmp_path / "changed", plant.tokenizer)
    number = plant.add_candidate(changed)
    (changed / "README.md").write_text("# Ours")
    with pytest.raises(DamagedExportError):
        measure_task(plant, number, task, POLICY)
    assert recorded(plant) == before


def test_a_task_whose_items_are_in_training_data_holds_the_release(plant: FilledPlant, candidate: int) -> None:
    from factory.ingest.rules.policy import DataPolicy
    from factory.ingest.rules.task_items import hash_item_ngrams

    words = "the capital of the first country that this question names is one that nobody would guess by chance"
    items = [{**item, "question": f"{words} {'x' * number}?"} for number, item in enumerate(choice_items(), 1)]
    items[1:] = choice_items()[1:]
    task = load_task(write_task(plant.workspace, "leaked", items), POLICY)
    assert find_contaminated_items(plant, task) == []
    n = DataPolicy.load(plant.workspace.policy_path("data.yaml")).decontamination.ngram
    gram = hash_item_ngrams({"q": words}, n)[:1]
    subject = f"shard:{plant.documents[0].key.partition(':')[0]}"
    write_hashes(plant.workspace.root, subject, [HashedDocument(plant.documents[0].key, None, gram, False)])
    with plant.ledger.begin() as tx:
        record_event(tx, "ingested", subject)
    assert find_contaminated_items(plant, task) == [(0, plant.documents[0].key)]
    document = plant.documents[0].key
    with refused("measuring.contaminated", TaskError, count=1, items=12, record=1, document=document):
        measure_task(plant, candidate, task, POLICY)
    lenient = TasksPolicy(contaminated_max=0.1)
    number = measure_task(plant, candidate, task, lenient)
    assert EvaluationRow.get(plant.ledger, number).summary["contaminated"] == 1


def test_lm_eval_in_the_sandbox_generates_and_reads_no_more_than_its_folder(plant: FilledPlant, candidate: int) -> None:
    """Exact match on generated text, totals as lm-eval computes them; a template that runs code reaches nothing."""
    pytest.importorskip("lm_eval")
    generated = {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": None,
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
        "metadata": {"cluster_by": "source"},
    }
    items = [{**item, "source": f"s{item['id'] // 2}"} for item in sums(12)]
    task = load_task(write_lm_eval_task(plant.workspace, "theirs", items, **generated), POLICY)
    number = measure_task(plant, candidate, task, POLICY)
    summary = EvaluationRow.get(plant.ledger, number).summary
    assert summary["metrics"]["theirs/exact_match"]["value"] == pytest.approx(summary["totals"]["exact_match,none"])
    assert (summary["items"], summary["clusters"], summary["kind"]) == (12, 6, "lm-eval")
    ledger = plant.workspace.root / "ledger.db"
    spy = f"{{{{ cycler.__init__.__globals__.os.stat('{ledger}') }}}}"
    hostile = write_lm_eval_task(plant.workspace, "spy", items, **{**generated, "doc_to_text": spy})
    with refused("measuring.failed", TaskError, task="spy") as found:
        measure_task(plant, candidate, load_task(hostile, POLICY), POLICY)
    assert says(found.value.message, ("lm_eval_run.failed", {}))
    assert re.search(f"FileNotFoundError: .*'{ledger}'", str(found.value))


def test_items_without_an_answer_are_an_error_and_not_wrong_answers(plant: FilledPlant, candidate: int) -> None:
    """As lm-eval counts them."""
    pytest.importorskip("lm_eval")
    without = [{key: value for key, value in item.items() if key != "answer"} for item in choice_items()]
    with refused("lm_eval_file.missing_key", TaskError, record=1, key="answer"):
        load_task(write_lm_eval_task(plant.workspace, "un", without), POLICY)
    before = recorded(plant)
    items = choice_items()
    items[7]["answer"] = 4
    task = load_task(write_lm_eval_task(plant.workspace, "un", items), POLICY)
    with refused("measuring.failed", TaskError, task="un") as found:
        measure_task(plant, candidate, task, POLICY)
    assert says(found.value.message, ("lm_eval_run.failed", {})) and "document 7 has no answer" in str(found.value)
    assert recorded(plant) == before


def test_repeated_items_of_a_published_benchmark_count_as_one_cluster(plant: FilledPlant, candidate: int) -> None:
    """lm-eval measures each, and so are the totals that are compared with published ones; a choice that stands twice is theirs to mend, too."""
    pytest.importorskip("lm_eval")
    items = [*choice_items(), {**choice_items()[1], "id": "again"}]
    items[7] |= {"choices": ["yes", "no", "yes", "perhaps"], "answer": 2}
    task = load_task(write_lm_eval_task(plant.workspace, "published", items), POLICY)
    summary = EvaluationRow.get(plant.ledger, measure_task(plant, candidate, task, POLICY)).summary
    assert (summary["items"], summary["clusters"]) == (13, 12)


def test_lm_evals_bits_per_byte_is_a_cost_metric(plant: FilledPlant, candidate: int) -> None:
    pytest.importorskip("lm_eval")
    texts = [{"text": document.content["text"]} for document in plant.documents if document.domain == "docs"][:9]
    keys = {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}", "doc_to_choice": None,
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
    }  # fmt: skip
    task = load_task(write_lm_eval_task(plant.workspace, "texts", texts, **keys), POLICY)
    number = measure_task(plant, candidate, task, POLICY)
    summary = EvaluationRow.get(plant.ledger, number).summary
    assert summary["costs"] == ["texts/bits_per_byte"] and set(summary["metrics"]) == {"texts/bits_per_byte"}
    assert summary["metrics"]["texts/bits_per_byte"]["value"] == pytest.approx(summary["totals"]["bits_per_byte,none"])
    assert 1 < summary["metrics"]["texts/bits_per_byte"]["value"] < 8 and math.isfinite(
        summary["totals"]["word_perplexity,none"]
    )
