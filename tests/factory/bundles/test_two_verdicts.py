"""A bundle with a verdict of another version of the judge: deciding values are compared, the words of reasons are not, and the check says so."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from factory.bundles.files import layout
from factory.bundles.files.folder import BundleFolder
from factory.bundles.judging_again import compare_verdicts
from factory.bundles.verifying import run_check
from factory.evals.parity import ProbeCheck
from factory.gates.release import judge_version
from factory.gates.release.recorded_verdict import compute_evidence_sha256
from tests.support.messages import codes, says, tree
from tests.support.paths import ROOT

Change = Callable[[dict[str, Any]], object]
WORDS, OTHER_WORDS = '"The candidate is better than {champion}: {change}."', '"It beats {champion}, 2 to 0: {words}."'


def changed(bundle: Path, path: str, change: Change) -> Path:
    value = json.loads((bundle / path).read_text())
    change(value)
    if path == layout.EVIDENCE:
        value["sha256"] = compute_evidence_sha256(value)
    (bundle / path).write_text(json.dumps(value))
    return bundle


def forget(verdict: dict[str, Any]) -> None:
    """As an older factory wrote it, or as who wants it judged less strictly."""
    del verdict["judge"]


def forge(verdict: dict[str, Any]) -> None:
    verdict["judge"] = {"sha256": "f" * 64, "version": "llm-factory 9"}


def reworded(verdict: dict[str, Any]) -> None:
    verdict["reasons"][0] = verdict["reasons"][0].replace("The candidate is better than", "It beats")


def judged(bundle: Path) -> ProbeCheck:
    return run_check("verdict", BundleFolder.open(bundle))


def test_the_judge_version_covers_the_files_that_the_judge_imports() -> None:
    apart = {"factory/core/policy_file.py", "factory/evals/tasks.py"}  # read files, and measure
    found: set[str] = set()
    pending = ["factory/gates/release/judge.py"]
    while pending:
        path = pending.pop()
        found.add(path)
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            file = f"{module.replace('.', '/')}.py" if module else ""
            if file.startswith(("factory/", "kernels/")) and file not in found | apart:
                pending.append(file)
    assert sorted(found) == list(judge_version.FILES)


def test_a_verdict_names_the_version_of_its_judge(bundle: Path) -> None:
    told = json.loads((bundle / layout.VERDICT).read_text())["judge"]
    assert told == judge_version.compute_judge_version().to_json()
    assert codes(tree(judged(bundle).detail)) == ["verdict_comparison.same", "verdict_comparison.promoted"]


def test_the_same_version_of_the_judge_must_repeat_its_words(bundle: Path) -> None:
    found = judged(changed(bundle, layout.VERDICT, reworded))
    assert found.ok is False and "reasons/0 is 'It beats candidate 1" in found.detail
    assert "version" not in found.detail


@pytest.mark.parametrize(
    "record, judges",
    [
        (forget, ("verdict_comparison.unknown_judge", {})),
        (forge, ("verdict_comparison.other_judge", {"recorded": "llm-factory 9, sha256 ffffffffffff"})),
    ],
)
def test_another_judge_may_give_reasons_in_other_words(
    bundle: Path, record: Change, judges: tuple[str, dict[str, Any]]
) -> None:
    found = judged(changed(bundle, layout.VERDICT, record))
    assert (
        found.ok and codes([found.detail]) == ["verdict_comparison.same_by_other_judge"] and says(found.detail, judges)
    )
    reasons = json.loads((bundle / layout.VERDICT).read_text())["reasons"]
    found = judged(changed(bundle, layout.VERDICT, reworded))
    assert found.ok and says(found.detail, judges) and judge_version.compute_judge_version().sha256[:12] in found.detail
    assert says(found.detail, ("verdict_comparison.other_words", {"differing": 1, "reasons": len(reasons)}))
    assert "It beats candidate 1" in found.detail
    facts = compare_verdicts(BundleFolder.open(bundle)).to_json()
    assert not facts["same"] and facts["worded_otherwise"][0].startswith("It beats candidate 1")
    assert facts["here"] == judge_version.compute_judge_version().to_json()


# What is done to a bundle → what is said of it, whichever judge the record names.
DECIDES: dict[str, tuple[str, Change, str]] = {
    "the outcome": (layout.VERDICT, lambda v: v.update(outcome="hold"), "outcome is 'hold', expected 'promote'"),
    "the champion": (layout.VERDICT, lambda v: v.update(against=None), "against is None, expected 'candidate:1'"),
    "no outcome": (layout.VERDICT, lambda v: v.pop("outcome"), "outcome is None, expected 'promote'"),
    "a number of a reason": (layout.VERDICT, lambda v: v["reasons"].__setitem__(0, v["reasons"][0].replace("0.2", "0.9", 1)), "−0.900"),
    "no reasons": (layout.VERDICT, lambda v: v.update(reasons=None), "reasons"),
    "a gain that is none": (layout.EVIDENCE, lambda e: e["target"].update(gain=-0.1), "gives outcome reject"),
    "a check that failed": (layout.EVIDENCE, lambda e: e["checks"].update(logits=[False, "apart"]), "gives outcome reject"),
}  # fmt: skip


@pytest.mark.parametrize("record", [lambda verdict: None, forget, forge])
@pytest.mark.parametrize("what", DECIDES)
def test_deciding_values_are_compared_for_any_version_of_the_judge(bundle: Path, what: str, record: Change) -> None:
    path, change, said = DECIDES[what]
    changed(bundle, layout.VERDICT, record)
    found = judged(changed(bundle, path, change))
    assert found.ok is False and said in found.detail, found.detail


@pytest.mark.parametrize("record", [lambda verdict: None, forget, forge])
def test_a_forged_number_of_the_evidence_is_found_for_any_version_of_the_judge(bundle: Path, record: Change) -> None:
    changed(bundle, layout.VERDICT, record)
    changed(bundle, layout.EVIDENCE, lambda evidence: evidence["target"].update(gain=0.25))
    found = run_check("evidence", BundleFolder.open(bundle))
    assert found.ok is False and "target/gain is 0.25" in found.detail


def test_another_judge_may_estimate_another_power(bundle: Path) -> None:
    """It decides nothing, and is what a better formula changes."""

    def more(verdict: dict[str, Any]) -> None:
        told = next(n for n, reason in enumerate(verdict["reasons"]) if "is detected with a probability" in reason)
        verdict["reasons"][told] = verdict["reasons"][told].replace("A gain of 0.", "A gain of 7.")

    assert judged(changed(bundle, layout.VERDICT, more)).ok is False
    assert judged(changed(bundle, layout.VERDICT, forget)).ok


@pytest.mark.parametrize(
    "judge", [1, [], {}, {"sha256": "f" * 64}, {"sha256": "f", "version": "x"}, {"sha256": "f" * 64, "version": None}]
)
def test_an_invalid_record_of_the_judge_is_a_failed_check(bundle: Path, judge: Any) -> None:
    found = judged(changed(bundle, layout.VERDICT, lambda verdict: verdict.update(judge=judge)))
    assert found.ok is False and codes([found.detail]) == ["verdict_comparison.odd_judge"]
