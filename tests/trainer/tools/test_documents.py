from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.messages import refused
from tests.support.trainer.segments import MakeShard, plan_of, recipe_with, train_here, write_spec
from trainer.contract.data.data_order import DataOrder, list_document_keys
from trainer.contract.errors import CheckpointError, SpecError
from trainer.tools.documents import list_step_documents, main


def test_the_listed_documents_are_those_of_every_step_of_a_trunk_and_its_anneal(
    tmp_path: Path, make_shard: MakeShard, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each equals the result of one walk from the first step, wherever the walk begins."""
    plan = plan_of(make_shard(), phases=[{"from_step": 8, "weights": {"docs": 0.5, "code": 0.5}}])
    recipe = recipe_with(
        batch__packing="truncate-and-concatenate",
        batch__warmup=[{"until_step": 6, "sequences": 4}],
        checkpoint_every=4,
        keep_checkpoints=9,
    )
    order = DataOrder(plan, context=32, batch=recipe.batch, vocab_size=512)
    expected = [list_document_keys(order, order.draw_next_rows()) for _ in range(18)]

    trunk = write_spec(tmp_path / "trunk", plan, recipe, last_step=13)
    assert list_step_documents(trunk, 7) == expected[7]  # before it ran
    assert train_here(trunk) == (0, "")
    end = trunk / "checkpoints" / "step-00000013"
    anneal = write_spec(
        tmp_path / "anneal", plan, recipe, kind="anneal", first_step=13, last_step=18, initial_checkpoint=str(end)
    )
    assert [list_step_documents(trunk, step) for step in range(13)] == expected[:13]
    assert [list_step_documents(anneal, step) for step in range(13, 18)] == expected[13:]
    for folder, step, steps in ((trunk, 13, (0, 12)), (anneal, 12, (13, 17))):
        with refused("trainer.no_step", SpecError, step=step, first=steps[0], last=steps[1]):
            list_step_documents(folder, step)

    assert main([str(trunk), "10", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"step": 10, "documents": expected[10]}
    assert main([str(trunk), "10"]) == 0 and capsys.readouterr().out.split() == expected[10]
    assert main([str(trunk), "99"]) == 2 and "error[trainer.no_step]" in capsys.readouterr().err

    # a damaged checkpoint is passed over for an older one; a damaged start is an error
    state = trunk / "checkpoints" / "step-00000008" / "state.json"
    state.write_text(state.read_text().replace('"place"', '"plaice"') + " ")
    assert list_step_documents(trunk, 10) == expected[10]
    state = end / "state.json"
    state.write_text(state.read_text() + " ")
    with refused("trainer.hash_mismatch", CheckpointError, file=str(state)):
        list_step_documents(anneal, 14)


def test_a_segment_with_restart_data_lists_documents_from_the_plans_beginning(
    tmp_path: Path, make_shard: MakeShard
) -> None:
    plan = plan_of(make_shard())
    trunk = write_spec(tmp_path / "trunk", plan, last_step=4)
    assert train_here(trunk) == (0, "")
    again = write_spec(
        tmp_path / "again",
        plan,
        first_step=4,
        last_step=8,
        initial_checkpoint=str(trunk / "checkpoints" / "step-00000004"),
        restart_data=True,
    )
    before = [list_step_documents(again, step) for step in range(4, 8)]
    assert before == [list_step_documents(trunk, step) for step in range(4)]
    assert train_here(again) == (0, "")
    assert [list_step_documents(again, step) for step in range(4, 8)] == before
