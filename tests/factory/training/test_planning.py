"""Plans of segments in a real ledger over real token shards, while the data of one domain after the other arrive."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from factory.core.errors import ConfigError, InputError
from factory.core.workspace import Workspace
from factory.data.licence_settlement import settle_licence
from factory.ingest.rules.licence_claims import CONFLICT_EVENT
from factory.ledger.ledger import Ledger, documents, record_event, segments, token_shards
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.training.planning import forecast_trunk, load_recipe, plan_anneal, plan_trunk, read_data_plan
from kernels.contract.machine import describe_this_machine
from tests.support.factory.planned import STEP, change_recipe, ingested, last_event
from tests.support.messages import refused
from tests.support.said import Said
from trainer.contract.data.token_shard import TokenShard
from trainer.contract.plan import precision


@pytest.fixture
def planned(plant: Workspace) -> tuple[Workspace, Ledger]:
    return plant, Ledger.open(plant.ledger_url)


def test_a_segments_row_records_its_precision_and_kernels_and_a_slow_precision_warns(
    planned: tuple[Workspace, Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, ledger = planned
    ingested(workspace, ledger, code=40 * STEP)
    rates = {name: {"products": 1e9} for name in ("fp32", "bf16")}
    probe = precision.PrecisionTimings("cpu", {"fp32": 2.0, "bf16": 1.0}, rates)
    monkeypatch.setattr(precision, "time_precisions", lambda recipe, device, seconds: probe)
    said = Said()
    row = ledger.select_first(sa.select(segments).where(segments.c.id == plan_trunk(Plant(workspace, ledger, said))))
    assert row is not None and row["recipe_json"]["precision"] == "fp32", "a precision by name is obeyed"
    assert row["computing"]["precision"]["probe"]["seconds"] == {"fp32": 2.0, "bf16": 1.0}
    assert row["computing"]["machine"]["name"] == describe_this_machine("cpu").name
    (warning,) = [line for line in said.lines if "precision" in line]
    assert "bf16 is 2.0x as fast" in warning


def test_domains_that_have_not_arrived_are_left_out_and_recorded(planned: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = planned
    ingested(workspace, ledger, code=40 * STEP)
    number = plan_trunk(Plant(workspace, ledger))
    assert read_data_plan(ledger, SegmentRow.get(ledger, number))["weights"] == {"code": 0.6, "*": 0.1}
    planned_so = {"kind": "trunk", "steps": [0, 20], "domains_not_arrived": ["chat", "docs"]}
    assert last_event(ledger) == planned_so | {"notes": last_event(ledger)["notes"]}


def test_a_plan_has_every_domain_of_the_mixture_once_all_have_arrived(planned: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = planned
    ingested(workspace, ledger, code=40 * STEP)
    ingested(workspace, ledger, docs=40 * STEP, chat=40 * STEP, wiki=STEP)
    number = plan_trunk(Plant(workspace, ledger))
    assert read_data_plan(ledger, SegmentRow.get(ledger, number))["weights"] == load_recipe(workspace).mixture.weights
    assert last_event(ledger)["domains_not_arrived"] == []


def test_a_mixture_without_documents_is_refused(planned: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = planned
    ingested(workspace, ledger, wiki=40 * STEP)
    change_recipe(workspace, mixture={"weights": {"code": 1.0}})
    with refused("training.recipe_does_not_fit", ConfigError, recipe="tiny") as raised:
        plan_trunk(Plant(workspace, ledger))
    assert all(word in str(raised.value) for word in ("weights", "code", "wiki"))
    phases = [{"from_step": 10, "weights": {"maths": 1.0}}]
    change_recipe(workspace, mixture={"weights": {"wiki": 1.0}, "phases": phases})
    with refused("training.recipe_does_not_fit", ConfigError, recipe="tiny") as raised:
        plan_trunk(Plant(workspace, ledger))
    assert "phases.0.weights" in str(raised.value) and "maths" in str(raised.value)
    plan_trunk(Plant(workspace, ledger), steps=10)  # ends where the phase begins
    assert last_event(ledger)["domains_not_arrived"] == ["maths"]


def test_the_forecast_counts_steps_with_the_smaller_batches_of_the_warmup(planned: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = planned
    change_recipe(
        workspace,
        batch={"warmup": [{"until_step": 8, "sequences": 2}]},
        mixture={"weights": {"*": 1.0}, "max_epochs": 1},
    )
    # 8 steps of 2 rows are 2 steps of 8; an anneal of 6 steps is kept back
    ingested(workspace, ledger, code=(2 + 4 + 6) * STEP + STEP // 2)
    trunk = forecast_trunk(Plant(workspace, ledger))
    assert (trunk.steps, trunk.missing_tokens) == (8 + 4, 0)


def test_the_forecast_misses_the_tokens_of_one_step_and_an_anneal(planned: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = planned
    change_recipe(
        workspace,
        batch={"warmup": [{"until_step": 8, "sequences": 2}]},
        mixture={"weights": {"*": 1.0}, "max_epochs": 1},
    )
    assert forecast_trunk(Plant(workspace, ledger)).missing_tokens == 7 * 2 * 32
    ingested(workspace, ledger, code=100)
    assert forecast_trunk(Plant(workspace, ledger)).missing_tokens == 7 * 2 * 32 - 100
    with refused("training.too_few_tokens", InputError, recipe="tiny", max_epochs=1, missing=7 * 2 * 32 - 100):
        plan_trunk(Plant(workspace, ledger))


def test_as_many_new_tokens_as_the_forecast_misses_are_enough(planned: tuple[Workspace, Ledger]) -> None:
    """They are read ``max_epochs`` times, so fewer are missing than positions."""
    workspace, ledger = planned
    change_recipe(workspace, mixture={"weights": {"*": 1.0}, "max_epochs": 4})
    assert forecast_trunk(Plant(workspace, ledger)).missing_tokens == 7 * STEP // 4
    for code, missing in ((240, 7 * STEP // 4 - 240), (200, 7 * STEP // 4 - 440)):
        ingested(workspace, ledger, code=code)
        trunk = forecast_trunk(Plant(workspace, ledger))
        assert (trunk.steps, trunk.missing_tokens) == (0, missing)
    ingested(workspace, ledger, code=20)  # at least 8 were missing
    assert forecast_trunk(Plant(workspace, ledger)).steps == 1


def test_nothing_is_planned_while_a_segment_is_parked(planned: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = planned
    ingested(workspace, ledger, code=80 * STEP)
    becomes = lambda number, state: segments.update().where(segments.c.id == number).values(state=state)
    first = plan_trunk(Plant(workspace, ledger), 2)
    with ledger.begin() as tx:
        tx.execute(becomes(first, "done"))
    second = plan_anneal(Plant(workspace, ledger))
    for plan in (plan_anneal, plan_trunk):
        with ledger.begin() as tx:
            tx.execute(becomes(second, "failed"))
        with refused("retrying.parked_to_do", InputError, segment=second):
            plan(Plant(workspace, ledger))
        assert len(ledger.select_rows(sa.select(segments))) == 2
    with ledger.begin() as tx:
        tx.execute(becomes(second, "abandoned"))
    assert plan_anneal(Plant(workspace, ledger)) == second + 1


def test_a_plan_with_too_much_padding_is_refused(planned: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = planned
    ingested(workspace, ledger, code=80 * STEP)
    change_recipe(workspace, batch={"packing": "document", "max_padding": 0.0})
    with pytest.raises(ConfigError, match="batch.max_padding.*model.context"):
        plan_trunk(Plant(workspace, ledger))
    assert ledger.select_first(sa.select(segments)) is None
    change_recipe(workspace, batch={"packing": "document", "max_padding": 0.5})
    plan_trunk(Plant(workspace, ledger))


def test_a_document_that_came_again_under_a_forbidding_licence_carries_no_loss(
    planned: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = planned
    ingested(workspace, ledger, code=40 * STEP)
    (shard,) = ledger.select_rows(sa.select(token_shards))
    masked = lambda: read_data_plan(ledger, SegmentRow.get(ledger, plan_trunk(Plant(workspace, ledger), 2))).get(
        "masked", []
    )
    kept = str(TokenShard(shard["path"]).documents["key"][0])
    rows: list[dict[str, Any]] = [
        {"key": kept, "fate": "train", "license": "MIT", "token_shard": shard["id"]},
        {"key": "copy", "fate": "dropped", "license": "proprietary", "rule": "licence", "matched": kept},
    ]
    with ledger.begin() as tx:
        for number, row in enumerate(rows):
            tx.execute(documents.insert().values(**row, id=row["key"], shard=shard["shard"], row=number, domain="code"))
    assert masked() == []  # no ingest said so: the long table of documents is not searched
    with ledger.begin() as tx:
        record_event(tx, CONFLICT_EVENT, "shard:s", {})
        tx.execute(segments.delete())
    assert masked() == [kept]
    settle_licence(ledger, "MIT", [kept], [], "ann", "")
    with ledger.begin() as tx:
        tx.execute(segments.delete())
    assert masked() == []
