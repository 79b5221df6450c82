"""Real ranks over gloo, started by torchrun: every layout gives the same training, and can continue the checkpoints of another layout."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.forks import quick
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.trainer.families import DESCRIBED
from tests.support.trainer.segment_runs import records, result
from tests.support.trainer.segments import (
    MakeShard,
    make_documents,
    plan_of,
    recipe_with,
    run_trainer,
    train_here,
    write_spec,
)
from tests.support.trainer.small_models import run_of
from trainer.batch import make_batch
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.data.data_order import DataOrder
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.token_shard import write_token_shard

OF_SEVERAL_RANKS = {"rank_grad_norm_ratio"}
EXPERTS = {"count": 4, "per_token": 2, "d_ff": 32, "dense_layers": 1, "shared": 1}


def torchrun(ranks: int, *folders: Path) -> None:
    """One segment after the other, by the same ranks: to start them costs many times what a tiny segment does."""
    launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d")
    code, errors = run_trainer(list(folders), *launcher, "--rdzv-endpoint=localhost:0")
    assert code == 0, errors


def assert_near(ours: Path, theirs: Path, loss: float = 2e-5, weight: float = 5e-4) -> None:
    """The same run up to the order of sums."""
    a, b = records(ours), records(theirs)
    assert len(a) == len(b)
    for mine, other in zip(a, b, strict=True):
        assert mine.keys() - OF_SEVERAL_RANKS == other.keys() - OF_SEVERAL_RANKS
        assert mine["loss"] == pytest.approx(other["loss"], abs=loss)
        assert mine["tokens"] == other["tokens"] and mine["supervised_tokens"] == other["supervised_tokens"]
        for key in mine:
            if key.startswith(
                (
                    "grad_norm",
                    "update_ratio",
                    "noise_scale",
                    "activation_max",
                    "attention_logit_max",
                    "multi_token_loss",
                )
            ):
                assert mine[key] == pytest.approx(other[key], rel=2e-2), key
            if key.startswith("router_balance"):  # a token on the edge between two experts may move
                assert mine[key] == pytest.approx(other[key], abs=0.02), key
    one, two = (checkpoints.load_checkpoint(Path(result(folder)["checkpoint"])) for folder in (ours, theirs))
    assert one.state["sampler"] == two.state["sampler"]
    for kind, mine_t, other_t in (("model", one.model, two.model), ("optimizer", one.optimizer, two.optimizer)):
        assert mine_t.keys() == other_t.keys()
        for name in mine_t:
            if kind == "model":
                torch.testing.assert_close(mine_t[name], other_t[name], atol=weight, rtol=5e-3, msg=name)
            assert mine_t[name].shape == other_t[name].shape


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shard": (2, {}),
    "tensor": (2, {"parallel__tensor": 2}),
    "replicas": (2, {"parallel__replicas": 2, "batch__micro_sequences": 2}),
    "tensor-experts": (2, {"parallel__tensor": 2, "model__experts": EXPERTS, "batch__micro_sequences": 4}),
    "shard-experts-muon": (2, {"model__experts": EXPERTS, "optimizer__name": "muon", "batch__micro_sequences": 2}),
    "shard-windows": (2, DESCRIBED["gemma2"] | {"batch__micro_sequences": 2}),
    "shard-norms": (2, DESCRIBED["olmo2"]),
    "shard-balance-loss": (2, DESCRIBED["qwen3-moe"] | {"batch__micro_sequences": 2}),
    "tensor-biases": (2, DESCRIBED["llama"] | {"parallel__tensor": 2}),
    "tensor-windows": (
        2,
        DESCRIBED["gemma2"]
        | {"parallel__tensor": 2, "parallel__recompute": "block", "stability__noise_scale_every": 0},
    ),
    "tensor-latent": (2, DESCRIBED["deepseek"] | {"parallel__tensor": 2}),
    "shard-multi-token": (2, DESCRIBED["multi-token"] | {"batch__micro_sequences": 2}),
    "tensor-multi-token": (
        2,
        DESCRIBED["multi-token"]
        | {"parallel__tensor": 2, "parallel__recompute": "block", "stability__noise_scale_every": 0},
    ),
    "tensor-balance-loss": (2, DESCRIBED["qwen3-moe"] | {"parallel__tensor": 2}),
    "shard-sinks-expert-biases": (2, DESCRIBED["gpt-oss"] | {"batch__micro_sequences": 2}),
    "tensor-unit-norms": (2, DESCRIBED["nanochat"] | {"parallel__tensor": 2}),
    "shard-tensor-muon-recompute": (
        4,
        {"parallel__tensor": 2, "optimizer__name": "muon", "parallel__recompute": "block"},
    ),
}


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[DataPlan, Path]]:
    """By layout: the plan, and what its ranks made of six steps; all layouts of as many ranks at once."""
    folder = tmp_path_factory.mktemp("layouts")
    documents = make_documents(0, {"code": 120, "docs": 60, "chat": 60})
    plan = plan_of(write_token_shard(folder / "shards", documents, vocab_size=512, tokenizer_sha256="test"))
    done: set[int] = set()

    def of(layout: str) -> tuple[DataPlan, Path]:
        ranks = LAYOUTS[layout][0]
        if ranks not in done:
            asked = {name: changes for name, (count, changes) in LAYOUTS.items() if count == ranks}
            torchrun(
                ranks, *(write_spec(folder / name, plan, recipe_with(**asked[name]), last_step=6) for name in asked)
            )
            done.add(ranks)
        return plan, folder / layout

    return of


@pytest.mark.slow("two processes, and four, each of which loads torch's collectives")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_does_not_change_the_training(
    tmp_path: Path, laid_out: Callable[[str], tuple[DataPlan, Path]], layout: str
) -> None:
    plan, many = laid_out(layout)
    _, changes = LAYOUTS[layout]
    plain = {key: value for key, value in changes.items() if not key.startswith("parallel")}
    one = write_spec(tmp_path / "one", plan, recipe_with(**plain), last_step=6)
    assert train_here(one)[0] == 0  # a warning about a size is no failure
    muon = "optimizer__name" in changes  # orthogonalised in bf16: sums in another order may round another way
    assert_near(one, many, loss=2e-4 if muon else 2e-5, weight=5e-3 if muon else 5e-4)


@pytest.mark.slow("two segments by two ranks, and what one rank makes of them")
def test_in_fp8_a_layout_changes_only_the_order_of_sums(tmp_path: Path, make_shard: MakeShard) -> None:
    """FSDP gathers bf16 weights and quantises them whole; a tensor rank quantises its share. Both round elements as one rank does."""
    plan = plan_of(make_shard())
    split = {"parallel__tensor": 2}
    folders = {
        name: write_spec(tmp_path / name, plan, recipe_with(precision="fp8", **changes), last_step=6)
        for name, changes in {"one": {}, "shard": {}, "tensor": split}.items()
    }
    assert train_here(folders["one"]) == (0, "")
    torchrun(2, folders["shard"], folders["tensor"])
    one = records(folders["one"])
    for layout in ("shard", "tensor"):
        for mine, other in zip(one, records(folders[layout]), strict=True):
            assert mine["loss"] == pytest.approx(other["loss"], abs=0.01)
            assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.1)


@pytest.mark.slow("looks at what two processes trained")
def test_each_ranks_own_gradient_is_measured_before_the_sum(
    tmp_path: Path, make_shard: MakeShard, laid_out: Callable[[str], tuple[DataPlan, Path]]
) -> None:
    """The ratio of two ranks' norms, against what one process finds of each half of the rows alone."""
    plan, many = laid_out("shard")
    run = run_of(tmp_path, make_shard)
    shape = run.recipe.model
    batch = make_batch(DataOrder(plan, context=shape.context, batch=run.recipe.batch, vocab_size=shape.vocab_size))
    norms = []
    for rank in range(2):
        part = {
            name: rows[rank::2]
            for name, rows in batch.split_into_micro_batches(None)[0].items()
            if name not in ("domains_BT", "stretches")
        }
        gradients: list[Tensor] = []

        def keep(module: nn.Module, args: tuple[Tensor, ...], found: list[Tensor] = gradients) -> None:
            args[0].register_hook(found.append)  # type: ignore[no-untyped-call]

        handle = run.model.blocks[0].register_forward_pre_hook(keep)
        run.model.loss(**part, z_loss=run.recipe.stability.z_loss)[0].backward()  # type: ignore[no-untyped-call]
        handle.remove()
        norms.append(float(gradients[0].norm()))
    ratio = records(many)[0]["rank_grad_norm_ratio"]
    assert ratio == pytest.approx(max(norms) / min(norms), rel=1e-3) and ratio > 1.001


@pytest.mark.slow("seven segments, four of them by two ranks")
def test_a_checkpoint_moves_between_one_rank_two_ranks_and_tensor_ranks(tmp_path: Path, make_shard: MakeShard) -> None:
    plan = plan_of(make_shard())

    def segment(name: str, source: Path | None = None, **changes: Any) -> Path:
        """Four steps from nothing, or from the checkpoint that ``source`` ends with, under a layout."""
        first = 4 if source else 0
        start = str(source / "checkpoints" / "step-00000004") if source else None
        spec = {"first_step": first, "last_step": first + 4, "initial_checkpoint": start}
        return write_spec(tmp_path / name, plan, recipe_with(**changes), **spec)

    split = {"parallel__tensor": 2}
    one, two, tensor = segment("one"), segment("two"), segment("tensor", **split)
    tensor_two, two_tensor = segment("tensor-two", tensor), segment("two-tensor", two, **split)
    torchrun(2, two, tensor, tensor_two, two_tensor)
    one_one, two_one = segment("one-one", one), segment("two-one", two)
    assert train_here(one) == train_here(one_one) == train_here(two_one) == (0, "")
    for other in (two_one, tensor_two, two_tensor):
        assert_near(one_one, other)
    # reading what many ranks wrote and writing it again as one rank gives the same tensors
    whole = checkpoints.load_checkpoint(Path(result(tensor)["checkpoint"]))
    again = checkpoints.load_checkpoint(checkpoints.save_checkpoint(tmp_path / "again", whole))
    assert all(torch.equal(whole.model[n], again.model[n]) for n in whole.model)


@pytest.mark.long("three processes compile the blocks")
def test_two_ranks_train_in_bf16_with_compiled_blocks_as_one_rank_does(tmp_path: Path, make_shard: MakeShard) -> None:
    """Weights are saved in fp32, and the losses are those of one rank in bf16."""
    plan = plan_of(make_shard())
    changes = {"precision": "bf16", "compile": True, "model__layers": 1}
    one = write_spec(tmp_path / "one", plan, recipe_with(**changes), last_step=4)
    assert run_trainer(one) == (0, "")
    two = write_spec(tmp_path / "two", plan, recipe_with(**changes), last_step=4)
    torchrun(2, two)
    assert_near(one, two, loss=5e-3, weight=2e-2)
    loaded = checkpoints.load_checkpoint(Path(result(two)["checkpoint"]))
    assert all(tensor.dtype == torch.float32 for tensor in loaded.model.values())


def test_recomputed_blocks_change_nothing_at_all(tmp_path: Path, make_shard: MakeShard) -> None:
    plan = plan_of(make_shard())
    plain, again = (
        write_spec(tmp_path / name, plan, recipe_with(model__experts=EXPERTS, parallel__recompute=recompute))
        for name, recompute in (("plain", "none"), ("again", "block"))
    )
    assert train_here(plain) == train_here(again) == (0, "")
    a, b = (checkpoints.load_checkpoint(Path(result(folder)["checkpoint"])) for folder in (plain, again))
    assert all(torch.equal(a.model[n], b.model[n]) for n in a.model)
    assert records(plain) == records(again)


def test_every_group_of_ranks_waits_as_long_as_a_rank_may_need() -> None:
    """Another patience than torch's own for gloo, found in the group of all ranks and in each group of their mesh."""
    script = (
        "from datetime import timedelta\n"
        "import torch\n"
        "from tests.support.trainer.segments import recipe_with\n"
        "from trainer.parallel import ranks\n"
        "ranks.PATIENCE = timedelta(minutes=7)\n"
        "recipe = recipe_with()\n"
        "joined = ranks.Ranks.join(recipe.parallel, recipe.model)\n"
        "groups = [torch.distributed.group.WORLD, *joined.mesh.get_all_groups()]\n"
        "print([group._get_backend(torch.device('cpu')).options._timeout.total_seconds() for group in groups])\n"
        "torch.distributed.barrier()\n"  # or the store ends with rank 0 while rank 1 still joins
        "joined.leave()\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", script]
    environments = [os.environ | meet | {"RANK": str(rank), "PYTHONPATH": str(ROOT)} for rank in range(2)]
    ranks = [
        subprocess.Popen([*quick.forked(env), *command], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
        for env in environments
    ]
    assert [json.loads(process.communicate(timeout=PATIENCE_S)[0]) for process in ranks] == [[420.0] * 4] * 2
