"""Whole preflights of honest refactors and of faults, at several widths of the model: a few of those that ``benchmarks.judge.preflight`` makes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.judge.preflight import PARTS, WIDTHS, Batch, Case, Site
from benchmarks.judge.preflight_codes import FAULTS, HONEST
from factory.training.certificate import CodeJudgement, PreflightPolicy
from factory.training.preflight import LEAD_STEPS, judge_preflight


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


def judge_batch(site: Site, batch: Batch) -> list[CodeJudgement]:
    policy = PreflightPolicy.model_validate({"parts": batch.parts})
    return [judge_preflight(policy, evidence) for _, evidence in site.measure(batch)]


@pytest.mark.sample("squares summed row by row")
@pytest.mark.slow("four whole preflights of each commit, with two ranks")
@pytest.mark.parametrize("name", ["squares summed row by row", "twice the micro-batches, last one first"])
def test_an_honest_refactor_passes_at_each_width(site: Site, name: str) -> None:
    (code,) = (code for code in HONEST if code.name == name)
    judged = judge_batch(site, Batch(code, PARTS, [Case(name, "", width, 1) for width in WIDTHS]))
    assert [one.outcome for one in judged] == ["promote"] * len(WIDTHS), [one.reasons for one in judged]


@pytest.mark.slow("two preflights of each commit, some with two ranks")
@pytest.mark.parametrize(
    ("name", "size", "step"),
    [
        ("a rank's gradient is too large", "1e-4", LEAD_STEPS),
        ("one of 4 micro-batches counts too much", "1e-4", LEAD_STEPS),
        ("a reference kernel's output is too large", "1e-4", LEAD_STEPS),
        ("a kernel's gradient is too small", "1e-3", None),
        ("a resume forgets the scale of the moments", "", None),
    ],
)
def test_a_small_fault_is_refused_at_the_first_step_that_shows_it(
    site: Site, name: str, size: str, step: int | None
) -> None:
    """``step`` None: it depends on the width."""
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    code = replace(HONEST[0], name=name, edits=fault.edits)
    judged = judge_batch(site, Batch(code, [fault.part], [Case(name, size, width, 1) for width in (64, 256)]))
    assert [one.outcome for one in judged] == ["reject"] * 2, [one.reasons for one in judged]
    assert all(step in (None, one.reasons[0].data["step"]) for one in judged), [one.reasons for one in judged]
