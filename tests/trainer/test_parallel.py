"""Real ranks over gloo, started by torchrun: the same training whatever the layout, and checkpoints that move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.conftest import MakeShard, plan_of, recipe_with, run_trainer, write_spec
from tests.trainer.test_segment import records, result
from trainer import checkpoint as checkpoints
from trainer.data_plan import DataPlan

EXPERTS = {"count": 4, "per_token": 2, "d_ff": 32, "dense_layers": 1, "shared": 1}


def torchrun(folder: Path, ranks: int) -> None:
    launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d")
    code, errors = run_trainer(folder, *launcher, "--rdzv-endpoint=localhost:0")
    assert code == 0, errors


def assert_near(ours: Path, theirs: Path, loss: float = 2e-5, weight: float = 5e-4) -> None:
    """The same run up to the order of sums."""
    a, b = records(ours), records(theirs)
    assert len(a) == len(b)
    for mine, other in zip(a, b, strict=True):
        assert mine.keys() == other.keys()
        assert mine["loss"] == pytest.approx(other["loss"], abs=loss)
        assert mine["tokens"] == other["tokens"]
        for key in mine:
            if key.startswith(("grad_norm", "update_ratio", "noise_scale")):
                assert mine[key] == pytest.approx(other[key], rel=2e-2), key
    one, two = (checkpoints.load(Path(result(folder)["checkpoint"])) for folder in (ours, theirs))
    assert one.state["sampler"] == two.state["sampler"]
    for kind, mine_t, other_t in (("model", one.model, two.model), ("optimizer", one.optimizer, two.optimizer)):
        assert mine_t.keys() == other_t.keys()
        for name in mine_t:
            if kind == "model":
                torch.testing.assert_close(mine_t[name], other_t[name], atol=weight, rtol=5e-3, msg=name)
            assert mine_t[name].shape == other_t[name].shape


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {"parallel__tensor": 2}),
        (2, {"parallel__replicas": 2, "batch__micro_sequences": 2}),
        (2, {"parallel__tensor": 2, "model__experts": EXPERTS, "batch__micro_sequences": 4}),
        (2, {"model__experts": EXPERTS, "optimizer__name": "muon", "batch__micro_sequences": 2}),
        (4, {"parallel__tensor": 2, "optimizer__name": "muon", "parallel__recompute": "block"}),
    ],
    ids=["tensor", "replicas", "tensor-experts", "shard-experts-muon", "shard-tensor-muon-recompute"],
)
def test_a_layout_does_not_change_the_training(
    tmp_path: Path, make_shard: MakeShard, ranks: int, changes: dict[str, Any]
) -> None:
    plan = plan_of(make_shard())
    plain = {key: value for key, value in changes.items() if not key.startswith("parallel")}
    one = write_spec(tmp_path / "one", plan, recipe_with(**plain), last_step=6)
    assert run_trainer(one) == (0, "")
    many = write_spec(tmp_path / "many", plan, recipe_with(**changes), last_step=6)
    torchrun(many, ranks)
    muon = "optimizer__name" in changes  # orthogonalised in bf16: sums in another order may round another way
    assert_near(one, many, loss=2e-4 if muon else 2e-5, weight=5e-3 if muon else 5e-4)


def moved(tmp_path: Path, plan: DataPlan, source: Path, name: str, ranks: int, **changes: Any) -> Path:
    """Steps 4 to 8 from a checkpoint after step 4, under another layout."""
    start = str(result(source)["checkpoint"])
    folder = write_spec(
        tmp_path / name, plan, recipe_with(**changes), first_step=4, last_step=8, initial_checkpoint=start
    )
    if ranks == 1:
        assert run_trainer(folder) == (0, "")
    else:
        torchrun(folder, ranks)
    return folder


@pytest.mark.slow
def test_a_checkpoint_moves_between_one_rank_two_ranks_and_tensor_ranks(tmp_path: Path, make_shard: MakeShard) -> None:
    plan = plan_of(make_shard())
    one = write_spec(tmp_path / "one", plan, last_step=4)
    assert run_trainer(one) == (0, "")
    two = write_spec(tmp_path / "two", plan, last_step=4)
    torchrun(two, 2)
    tensor = write_spec(tmp_path / "tensor", plan, recipe_with(parallel__tensor=2), last_step=4)
    torchrun(tensor, 2)
    expected = moved(tmp_path, plan, one, "one-one", 1)
    assert_near(expected, moved(tmp_path, plan, two, "two-one", 1))
    assert_near(expected, moved(tmp_path, plan, tensor, "tensor-two", 2))
    assert_near(expected, moved(tmp_path, plan, two, "two-tensor", 2, parallel__tensor=2))
    # reading what many ranks wrote and writing it again as one rank gives the same tensors
    whole = checkpoints.load(Path(result(tensor)["checkpoint"]))
    again = checkpoints.load(checkpoints.save(tmp_path / "again", whole))
    assert all(torch.equal(whole.model[n], again.model[n]) for n in whole.model)


@pytest.mark.slow
def test_bf16_and_compiled_blocks_over_two_ranks(tmp_path: Path, make_shard: MakeShard) -> None:
    """fp32 master weights: what is saved is fp32, and the losses are those of one rank in bf16."""
    plan = plan_of(make_shard())
    changes = {"precision": "bf16", "compile": True}
    one = write_spec(tmp_path / "one", plan, recipe_with(**changes), last_step=4)
    assert run_trainer(one) == (0, "")
    two = write_spec(tmp_path / "two", plan, recipe_with(**changes), last_step=4)
    torchrun(two, 2)
    assert_near(one, two, loss=5e-3, weight=2e-2)
    loaded = checkpoints.load(Path(result(two)["checkpoint"]))
    assert all(tensor.dtype == torch.float32 for tensor in loaded.model.values())


def test_recomputed_blocks_change_nothing_at_all(tmp_path: Path, make_shard: MakeShard) -> None:
    plan = plan_of(make_shard())
    plain, again = (
        write_spec(tmp_path / name, plan, recipe_with(model__experts=EXPERTS, parallel__recompute=recompute))
        for name, recompute in (("plain", "none"), ("again", "block"))
    )
    assert run_trainer(plain) == run_trainer(again) == (0, "")
    a, b = (checkpoints.load(Path(result(folder)["checkpoint"])) for folder in (plain, again))
    assert all(torch.equal(a.model[n], b.model[n]) for n in a.model)
    assert records(plain) == records(again)
