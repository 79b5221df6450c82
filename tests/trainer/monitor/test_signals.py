"""Signals of layers, ranks and routers. Each number is compared with one computed in another way, and each injected fault is reported."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.trainer.segment_runs import result
from tests.support.trainer.segments import MakeShard, plan_of, train_here, write_spec
from tests.support.trainer.small_models import run_of
from trainer.batch import Batch, make_batch
from trainer.contract.checkpoint import format as checkpoints
from trainer.model.block import Block
from trainer.model.transformer import make_rope_tables
from trainer.monitor.signals import LEAST_BALANCE, QUERIES, LayerHistory, RankGradNormHistory, measure_expert_balance
from trainer.run import SegmentRun

EXPERTS = {"count": 4, "per_token": 2, "d_ff": 16}


def logits_of(block: Block, x_BTD: Tensor, batch: Batch) -> Tensor:
    """[heads, T, T] of the first row in fp64, -inf where a query doesn't see a key; by hand."""
    K = block.shape.head_dim
    rms = lambda x, w: x / (x.square().mean(-1, keepdim=True) + block.shape.norm_eps).sqrt() * w.double()
    cos_TK, sin_TK = (table[0].double() for table in make_rope_tables(batch.positions_BT, block.shape, torch.float32))
    turned = lambda x: torch.cat((-x[..., K // 2 :], x[..., : K // 2]), -1)
    h = rms(x_BTD[0].double(), block.attention_norm)
    heads = []
    for matrix, norm in ((block.q, block.q_norm), (block.k, block.k_norm)):
        x = rms((h @ matrix.double().T).view(len(h), -1, K), norm)
        heads.append((x * cos_TK[:, None] + turned(x) * sin_TK[:, None]).transpose(0, 1))
    q_HTK, k_GTK = heads
    logits = q_HTK @ k_GTK.repeat_interleave(len(q_HTK) // len(k_GTK), 0).transpose(1, 2) / math.sqrt(K)
    documents = batch.documents_BT[0]
    sees = (documents[:, None] == documents) & (documents >= 0) & torch.ones(len(h), len(h)).tril().bool()
    return torch.where(sees, logits, -math.inf)


def inputs_of(run: SegmentRun, batch: Batch) -> dict[str, Tensor]:
    """What each layer reads of the whole batch."""
    found: dict[str, Tensor] = {}
    handles = []
    for number, block in enumerate(run.model.blocks):

        def keep(module: nn.Module, args: tuple[Tensor, ...], name: str = f"blocks.{number}") -> None:
            found[name] = args[0].detach()

        handles.append(block.register_forward_pre_hook(keep))
    with torch.no_grad():
        run.model(batch.tokens_BT, batch.positions_BT, batch.documents_BT)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("micro", [None, 2])
def test_maxima_of_a_layer_equal_those_computed_from_its_inputs(
    tmp_path: Path, make_shard: MakeShard, micro: int | None
) -> None:
    run = run_of(tmp_path, make_shard, batch__micro_sequences=micro, stability__noise_scale_every=0)
    seen = set()
    for step in range(24):
        batch = make_batch(run.order)
        inputs = inputs_of(run, batch)
        expected = {name: float(logits_of(run.model.get_submodule(name), x, batch).max()) for name, x in inputs.items()}  # type: ignore[arg-type]
        record = run.train_step(batch)
        written = {key.partition("/")[2] for key in record if key.startswith("activation_max")}
        assert written == {key.partition("/")[2] for key in record if key.startswith("attention_logit_max")}
        assert len(written) == (step % 4 == 0 and run.monitor.find_layer_to_measure(step) != "embedding")
        for layer in written:
            assert record[f"activation_max/{layer}"] == pytest.approx(float(inputs[layer].abs().max()), rel=1e-5)
            assert record[f"attention_logit_max/{layer}"] == pytest.approx(max(0.0, expected[layer]), rel=1e-4)
        seen |= written
    assert seen == {"blocks.0", "blocks.1"} and run.recipe.model.context <= QUERIES  # all of a row's queries


def steps(run: SegmentRun, count: int) -> list[tuple[dict[str, Any], list[Any]]]:
    """(record, anomalies of the signals) of each step."""
    found = []
    for _ in range(count):
        record = run.train_step(make_batch(run.order))
        found.append((record, run.signals.after_step(record)))
    return found


def test_after_300_healthy_steps_a_quantity_that_jumps_is_reported(tmp_path: Path, make_shard: MakeShard) -> None:
    """First the update is too large for its rate, as with lost moments or a wrong β2. A rate that changes by design is no anomaly.

    Then, from the same 300 steps again, the input of the second layer is 20 times as large, and its queries and keys 10 times.
    """
    run = run_of(tmp_path, make_shard, 1500)
    assert [a for _, found in steps(run, 300) for a in found] == []
    weights, moments, signals = copy.deepcopy(
        (run.model.state_dict(), list(run.optimizer.state.values()), run.signals.state_dict())
    )
    for state in run.optimizer.state.values():
        state["exp_avg_sq"].mul_(1e-4)
    told = [a for _, found in steps(run, 4) for a in found]
    assert [(a.kind, a.step) for a in told if a.kind == "update_jump"] == [("update_jump", 300)]

    run.model.load_state_dict(weights)
    for state, kept in zip(run.optimizer.state.values(), moments, strict=True):
        state.update(kept)
    run.signals.load_state_dict(signals)
    with torch.no_grad():
        run.model.blocks[0].down *= 400
        for norm in (run.model.blocks[1].q_norm, run.model.blocks[1].k_norm):
            norm *= 10
    told = [a for _, found in steps(run, 12) for a in found]
    of = {a.kind: a for a in told if a.where == "layer/blocks.1"}
    assert {"activation_jump", "attention_logits"} <= of.keys()
    for anomaly in of.values():
        assert 304 <= anomaly.step < 316 and 288 < anomaly.onset <= 300  # the layer's turn before the change
        assert anomaly.value > 2 * anomaly.usual


def test_a_large_attention_logit_is_reported_once_until_it_ends(tmp_path: Path, make_shard: MakeShard) -> None:
    run = run_of(tmp_path, make_shard)
    record = {"skipped": False, "lr": 1.0}
    told = []
    for step, value in enumerate((50.0, 150.0, 160.0, 90.0, 120.0)):
        told += [
            (a.step, a.kind, a.where, a.usual)
            for a in run.signals._of_layer(step, record | {"attention_logit_max/blocks.1": value}, False)
        ]
    assert told == [(1, "attention_logits", "layer/blocks.1", 100.0), (4, "attention_logits", "layer/blocks.1", 100.0)]


def test_a_router_that_collapses_is_named_once(tmp_path: Path, make_shard: MakeShard) -> None:
    run = run_of(tmp_path, make_shard, model__experts=EXPERTS | {"bias_rate": 0.0})
    healthy = steps(run, 30)
    assert [a for _, found in healthy for a in found] == []
    key = "router_balance/blocks.1"
    assert all(LEAST_BALANCE < record[key] <= 1 for record, _ in healthy)
    run.model.blocks[1].router_bias.copy_(torch.tensor([0.0, 9.0, 9.0, 0.0]))
    after = steps(run, 3)
    assert [record[key] for record, _ in after] == [pytest.approx(0, abs=1e-6)] * 3
    assert [(a.step, a.kind, a.where) for _, found in after for a in found] == [
        (30, "router_collapse", "layer/blocks.1")
    ]


def test_expert_balance_equals_its_formula_worked_out_by_hand() -> None:
    load = torch.tensor([[8.0, 8.0, 8.0, 0.0], [5.0, 1.0, 1.0, 1.0]])
    entropy = -(5 / 8 * math.log(5 / 8) + 3 / 8 * math.log(1 / 8))
    assert measure_expert_balance(load, 1).tolist() == pytest.approx([2 / 3, (math.exp(entropy) - 1) / 3])
    assert measure_expert_balance(load, 4).tolist() == [1.0, 1.0]  # every token goes to every expert


def test_each_layer_is_compared_with_its_own_past() -> None:
    noise, turns = random.Random(1), LayerHistory(16)
    value = lambda part: {"small": 1.0, "large": 500.0}[part] * math.exp(noise.gauss(0, 0.1))
    for _ in range(100):
        for part in ("small", "large"):
            judged = turns.observe(part, value(part))
            assert judged is None or abs(judged[1]) < 8
    usual, deviations = turns.observe("small", 5.0) or (0.0, 0.0)
    assert usual == pytest.approx(1.0, rel=0.2) and deviations > 8
    assert turns.observe("large", math.nan) is None and turns.observe("new", 1.0) is None


@pytest.mark.parametrize(("ranks", "factor"), [(2, 5.0), (2, 0.2), (8, 5.0), (8, 0.2)])
def test_the_rank_that_moved_away_from_the_others_is_named(ranks: int, factor: float) -> None:
    noise, norms = random.Random(1), RankGradNormHistory(16)
    for step in range(200):
        common = math.exp(noise.gauss(0, 1))  # what all ranks' norms share, as after a hard batch, is no anomaly
        judged = norms.observe([common * math.exp(noise.gauss(0, 0.1)) for _ in range(ranks)])
        assert judged is None or judged[2] < 8, step
    moved = [1.0] * (ranks - 1)
    rank, apart, deviations = norms.observe([*moved[:1], factor, *moved[1:]]) or (0, 0.0, 0.0)
    assert apart > 3 and deviations > 8
    assert rank == 1
    assert norms.observe([math.inf, *moved]) is None


def test_the_state_survives_json_and_an_older_checkpoint_without_it_can_be_continued(
    tmp_path: Path, make_shard: MakeShard
) -> None:
    run = run_of(tmp_path, make_shard, 1500, model__experts=EXPERTS)
    steps(run, 120)
    kept = json.dumps(run.signals.state_dict())
    again = run_of(tmp_path / "again", make_shard, model__experts=EXPERTS).signals
    again.load_state_dict(json.loads(kept))
    assert json.dumps(again.state_dict()) == kept and len(json.loads(kept)["turns"]["update_ratio"]["changes"]) > 8
    plan = plan_of(make_shard())
    first = write_spec(tmp_path / "first", plan, last_step=4)
    assert train_here(first) == (0, "")
    loaded = checkpoints.load_checkpoint(Path(result(first)["checkpoint"]))
    state = {key: value for key, value in loaded.state.items() if key != "signals"}
    older = checkpoints.save_checkpoint(
        tmp_path / "older", checkpoints.Checkpoint(loaded.model, loaded.optimizer, state)
    )
    on = write_spec(tmp_path / "on", plan, first_step=4, last_step=6, initial_checkpoint=str(older))
    assert train_here(on) == (0, "")
