"""The draw of windows and patches, and the waiting audits, with a real ledger and a real repository."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from factory.audit import audit_windows
from factory.audit.audit_windows import (
    DRAWN,
    AuditWindow,
    choose_patches_to_audit,
    count_agreeing_audits_by_patch,
    draw_audit_window,
    list_merged_agent_patches,
    list_possible_windows,
    record_audit_window,
)
from factory.audit.policy import AuditPolicy
from factory.code_loop import approvals
from factory.code_loop.reverting import AUDITED
from factory.ledger.ledger import record_event, segments
from factory.ledger.rows import SegmentRow, Subject
from factory.ledger.writing import record_verdict
from tests.support.factory.approvals import PatchPlant
from trainer.contract.checkpoint.format import Checkpoint, save_checkpoint

ROW = SegmentRow(
    2, "trunk", 1, 1, "tiny", {"checkpoint_every": 5}, "", "plan", "", 20, 33, "planned", 0, "", None, None, 0.0, None
)  # fmt: skip


@pytest.fixture
def plant(tmp_path: Path) -> PatchPlant:
    return PatchPlant(tmp_path)


def test_windows_lie_between_checkpoints() -> None:
    assert list_possible_windows(ROW) == [(20, 25), (25, 30), (30, 33)]
    assert list_possible_windows(replace(ROW, first_step=18, last_step=20)) == [(18, 20)]
    first = replace(ROW, first_step=0, last_step=20, parent=None)
    assert list_possible_windows(first) == [(0, 5), (5, 10), (10, 15), (15, 20)]
    assert list_possible_windows(replace(first, last_step=4)) == [(0, 4)]
    each = replace(first, last_step=3, recipe_json={"checkpoint_every": 1})
    assert list_possible_windows(each) == [(0, 2), (1, 2), (2, 3)], "new weights: the first window has two steps"
    assert list_possible_windows(replace(first, last_step=1)) == []
    assert list_possible_windows(replace(ROW, kind="average", first_step=20, last_step=20)) == [(20, 20)]


def test_every_window_can_be_drawn(plant: PatchPlant) -> None:
    plant.judged()
    commit = plant.approve()
    assert commit
    counts: Counter[tuple[int, int]] = Counter()
    for number in range(2, 62):
        window = draw_audit_window(plant, replace(ROW, id=number, code_commit=commit))
        assert window is not None and window.patches == (1,)
        counts[window.first, window.last] += 1
    assert (
        counts.keys() == set(list_possible_windows(ROW)) and min(counts.values()) > 4
    )  # of 20 expected: 4 standard deviations


def test_a_window_is_drawn_once_and_only_for_code_that_agents_patched(plant: PatchPlant) -> None:
    assert draw_audit_window(plant, replace(ROW, code_commit=plant.base)) is None
    plant.judged()
    commit = plant.approve()
    assert commit
    row = replace(ROW, code_commit=commit)
    assert draw_audit_window(plant, replace(row, code_commit=plant.base)) is None  # before it was merged
    first = draw_audit_window(plant, row)
    assert first and all(draw_audit_window(plant, row) == first for _ in range(20))
    average = draw_audit_window(plant, replace(row, id=3, kind="average", first_step=33))
    assert average and (average.first, average.last, average.is_audited) == (33, 33, True)
    assert draw_audit_window(plant, replace(row, id=5, kind="import")) is None
    approvals.revert_approved_proposal(plant, 1, "ada")
    assert draw_audit_window(plant, replace(row, id=4, code_commit=plant.head())) is None


def test_the_steps_after_a_resume_are_drawn_too(plant: PatchPlant, tmp_path: Path) -> None:
    plant.judged()
    commit = plant.approve()
    assert commit
    row = replace(ROW, code_commit=commit, folder=str(tmp_path / "segment"))
    drawn = draw_audit_window(plant, row)
    assert drawn and drawn.resumed == ()

    def resume(step: int) -> AuditWindow:
        save_checkpoint(tmp_path / "segment" / "checkpoints", Checkpoint({"w": torch.ones(1)}, {}, {"step": step}))
        window = draw_audit_window(plant, row)
        assert window is not None and (window.first, window.last, window.patches) == (drawn.first, drawn.last, (1,))
        assert draw_audit_window(plant, row) == window == AuditWindow.find_for_segment(plant.ledger, row.id)
        return window

    assert resume(22).resumed == ((22, 25),)  # a stop between two checkpoints
    assert resume(32).resumed == ((22, 25), (32, 33))
    assert [(part.first, part.last) for part in resume(33).list_parts()] == [
        (drawn.first, drawn.last),
        (22, 25),
        (32, 33),
    ]


def test_a_resume_of_an_unaudited_segment_may_be_drawn(plant: PatchPlant, tmp_path: Path) -> None:
    row = replace(ROW, folder=str(tmp_path / "segment"))
    save_checkpoint(tmp_path / "segment" / "checkpoints", Checkpoint({"w": torch.ones(1)}, {}, {"step": 25}))
    record_audit_window(plant.ledger, row.id, AuditWindow(0, 0, ()))
    assert draw_audit_window(plant, row) == AuditWindow(0, 0, ()), "no patch is under audit"
    record_audit_window(plant.ledger, row.id, AuditWindow(0, 0, (1,)))
    assert draw_audit_window(plant, row) == AuditWindow(25, 30, (1,))


def test_a_window_of_an_older_factory_is_read(plant: PatchPlant) -> None:
    with plant.ledger.begin() as tx:
        record_event(tx, DRAWN, Subject("segment", 2), {"first": 25, "last": 30, "patches": [1]})
    assert AuditWindow.find_for_segment(plant.ledger, 2) == AuditWindow(25, 30, (1,))


def test_patches_are_in_the_order_of_their_merging(plant: PatchPlant) -> None:
    plant.judged(2, edits={"kernels/two.py": "x = 2\n"})
    plant.approve(2)
    plant.judged(1, edits={"kernels/one.py": "x = 1\n"})
    plant.approve(1)
    plant.judged(3, edits={"policies/recipes/tiny.yaml": "name: tiny\n"})  # learns otherwise, openly: the recipe gate's
    plant.approve(3)
    assert [row.number for row in list_merged_agent_patches(plant, plant.head())] == [2, 1]


def test_an_audited_patch_is_audited_less_often(plant: PatchPlant) -> None:
    policy = AuditPolicy(windows=2, share=0.9, later_share=0.2)
    assert choose_patches_to_audit([1, 2, 3], Counter({1: 2, 2: 1, 3: 2}), policy) == ([2, 3], 0.9)
    assert choose_patches_to_audit([1, 2], Counter({1: 2, 2: 5}), policy) == ([1, 2], 0.2)
    with plant.ledger.begin() as tx:
        for outcome in ("promote", "hold", "promote", "reject"):
            record_event(tx, AUDITED, Subject("segment", 2), {"outcome": outcome, "patches": [1, 4], "suspects": []})
    assert count_agreeing_audits_by_patch(plant.ledger) == {1: 2, 4: 2}


def test_an_audit_waits_for_its_segment_and_its_next_try_but_not_for_ever(plant: PatchPlant) -> None:
    policy = AuditPolicy(tries=2, again_after_seconds=1e-9)
    values = dict(vars(ROW))
    with plant.ledger.begin() as tx:
        tx.exec_driver_sql("INSERT INTO data_plans (id, plan) VALUES ('plan', '{}')")
        for number in (2, 3, 4):
            tx.execute(segments.insert().values(values | {"id": number, "state": "done" if number < 4 else "planned"}))
    assert audit_windows.find_due_audits(plant.ledger, policy) == [] == audit_windows.list_audits(plant.ledger)
    record_audit_window(plant.ledger, 3, AuditWindow(20, 25, (1,)))
    record_audit_window(plant.ledger, 2, AuditWindow(25, 30, (1,)))
    record_audit_window(plant.ledger, 4, AuditWindow(25, 30, (1,)))
    assert audit_windows.find_due_audits(plant.ledger, policy) == [2, 3]
    record_audit_window(plant.ledger, 3, AuditWindow(0, 0, (1,)))  # it could not be kept
    assert audit_windows.find_due_audits(plant.ledger, policy) == [2]

    def judged(outcome: str, **evidence: bool) -> None:
        same = {"policy_sha256": "", "subject_sha256": "", "evidence": evidence}
        with plant.ledger.begin() as tx:
            record_verdict(tx, "audit", Subject("segment", 2), against=None, outcome=outcome, reasons=["r"], **same)

    judged("hold")
    assert audit_windows.find_due_audits(plant.ledger, policy) == [2]
    assert audit_windows.find_due_audits(plant.ledger, policy.model_copy(update={"again_after_seconds": 1e6})) == []
    judged("hold")
    assert audit_windows.find_due_audits(plant.ledger, policy) == []
    more = policy.model_copy(update={"tries": 9})
    assert audit_windows.find_due_audits(plant.ledger, more) == [2]
    judged("hold", hidden_by_rounding=True)  # another try would show the same
    assert audit_windows.find_due_audits(plant.ledger, more) == []
    judged("promote")
    assert audit_windows.find_due_audits(plant.ledger, policy.model_copy(update={"tries": 9})) == []
    assert [
        (row["segment"], row["verdict"] and row["verdict"]["outcome"])
        for row in audit_windows.list_audits(plant.ledger)
    ] == [(2, "promote"), (4, None)]
