"""Frozen weights cost what the plan says: no gradient, no copy, and the dtype of the products; yet every checkpoint has them unrounded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from kernels import linear_cross_entropy, softcapped_cross_entropy
from kernels.contract.registry import bind_ops
from tests.support.trainer.segments import MakeShard, plan_of, recipe_with, run_trainer, train_here, write_spec
from trainer.contract.checkpoint.export import export_checkpoint
from trainer.contract.checkpoint.format import Checkpoint, find_checkpoint_fault, load_checkpoint, save_checkpoint
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.errors import CheckpointError
from trainer.contract.lora import is_lora_tensor
from trainer.contract.plan.spec import SegmentSpec
from trainer.contract.recipe import Recipe, is_trained
from trainer.frozen_weights import compute_crc, describe_unchanged, open_weights
from trainer.model.lora import measure_rows
from trainer.model.transformer import Decoder
from trainer.parallel.ranks import Ranks
from trainer.run import SegmentRun

WAYS: dict[str, dict[str, Any]] = {
    "lora": {"adapt": {"kind": "lora", "rank": 4, "alpha": 8.0}},
    "dora": {"adapt": {"kind": "dora", "rank": 4, "alpha": 8.0, "targets": ["q", "up", "down"]}},
    "frozen": {"freeze": ["embedding", "blocks.0", "blocks.1.q"]},
}


@pytest.fixture
def plan(make_shard: MakeShard) -> DataPlan:
    return plan_of(make_shard())


def train(folder: Path, plan: DataPlan, recipe: Recipe, first: int, last: int, start: Path | None) -> Path:
    """Train a segment; returns its last checkpoint."""
    write_spec(folder, plan, recipe, first_step=first, last_step=last, initial_checkpoint=start and str(start))
    assert train_here(folder) == (0, "")
    return Path(json.loads((folder / "result.json").read_text())["checkpoint"])


@pytest.fixture
def base(tmp_path: Path, plan: DataPlan) -> Path:
    """The checkpoint of step 4, trained whole, whose weights bf16 cannot hold."""
    made = train(tmp_path / "base", plan, recipe_with(), 0, 4, None)
    assert not any(torch.equal(w.bfloat16().float(), w) for w in load_checkpoint(made).model.values())
    return made


def list_frozen(recipe: Recipe, names: Any) -> set[str]:
    return {name for name in names if not is_trained(name, recipe.adapt, recipe.freeze)}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_holds_frozen_matrices_in_the_products_dtype_and_copies_none_for_a_save(
    tmp_path: Path, plan: DataPlan, base: Path, way: str
) -> None:
    recipe = recipe_with(**WAYS[way], precision="bf16", compile=False)
    folder = write_spec(tmp_path / "run", plan, recipe, first_step=4, last_step=6, initial_checkpoint=str(base))
    run = SegmentRun(SegmentSpec.load(folder), Ranks.join(recipe.parallel, recipe.model), base)
    frozen = list_frozen(recipe, run.parameters)
    assert frozen
    for name, parameter in run.parameters.items():
        rounded = name in frozen and parameter.ndim > 1
        assert parameter.dtype == (torch.bfloat16 if rounded else torch.float32), name
        assert parameter.requires_grad == (name not in frozen)
    contents, _ = run.collect_checkpoint_contents()
    assert contents["model"].keys() == run.parameters.keys() - frozen
    unchanged = run.list_unchanged()
    weights = load_checkpoint(base).model
    assert unchanged.layout.keys() == frozen and unchanged.record == base
    assert all(torch.equal(unchanged.read(name), weights[name]) for name in frozen)


@pytest.mark.parametrize("way", WAYS)
def test_frozen_weights_are_the_same_to_the_bit_after_a_segment_a_resume_and_an_export(
    tmp_path: Path, plan: DataPlan, base: Path, way: str
) -> None:
    """The run resumes from its own checkpoint of step 6, which stays until its last save, though only one is kept."""
    recipe = recipe_with(**WAYS[way], precision="bf16", compile=False, checkpoint_every=2, keep_checkpoints=1)
    straight = train(tmp_path / "straight", plan, recipe, 4, 10, base)
    again = tmp_path / "again"
    train(again, plan, recipe, 4, 6, base)
    (again / "result.json").unlink()
    seen: list[list[str]] = []
    resumed = train_watched(again, plan, recipe, base, seen)
    before, one, other = (load_checkpoint(path).model for path in (base, straight, resumed))
    frozen = list_frozen(recipe, one)
    assert frozen and all(torch.equal(before[name], one[name]) for name in frozen)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert not any(torch.equal(before[name], one[name]) for name in before.keys() - frozen)
    assert all("step-00000006" in there for there in seen) and len(seen) == 2
    assert [path.name for path in (again / "checkpoints").glob("step-*")] == ["step-00000010"]
    if way == "frozen":  # an export of adapted weights holds merged ones
        export_checkpoint(resumed, tmp_path / "export")
        export_checkpoint(base, tmp_path / "export-base")
        from safetensors.torch import load_file

        mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("export", "export-base"))
        same = {name for name in mine if torch.equal(mine[name], theirs[name])}
        assert {"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"} <= same < mine.keys()


def train_watched(folder: Path, plan: DataPlan, recipe: Recipe, base: Path, seen: list[list[str]]) -> Path:
    """Train on to step 10. ``seen``: the checkpoints of the folder before each save but the first."""
    from trainer import checkpoint_writer

    save = checkpoint_writer.save_rank_share

    def noted(parent: Path, *rest: Any) -> Path:
        seen.append(sorted(path.name for path in parent.glob("step-*")))
        return save(parent, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_writer, "save_rank_share", noted)
        return train(folder, plan, recipe, 4, 10, base)


class MadeShapes(TorchDispatchMode):
    """The shapes of all tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        made = function(*arguments, **keywords or {})
        if not function.is_view:
            self.shapes |= {tuple(leaf.shape) for leaf in tree_leaves(made) if isinstance(leaf, Tensor)}
        return made


def decoder_of(recipe: Recipe, dtype: torch.dtype, frozen_dtype: torch.dtype) -> Decoder:
    cpu = torch.device("cpu")
    ops = bind_ops({"linear_cross_entropy": "chunked"}, cpu, dtype, compile=False)
    return Decoder(recipe.model, ops, dtype, adapt=recipe.adapt, freeze=recipe.freeze, frozen_dtype=frozen_dtype)


def arguments_of(tokens: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(3, 512, (1, tokens), generator=generator)
    return ids, ids.roll(-1), torch.full((1, tokens), 1 / tokens), torch.arange(tokens)[None], torch.zeros_like(ids)


@pytest.mark.parametrize("way", WAYS)
def test_no_gradient_of_a_frozen_matrix_is_made(way: str) -> None:
    """Nothing of its shape is made in the backward pass. Of 29 tokens no activation has the shape of a matrix."""
    recipe = recipe_with(**WAYS[way])
    decoder = decoder_of(recipe, torch.float32, torch.float32)
    decoder.initialise(1)
    shapes = {name: tuple(p.shape) for name, p in decoder.named_parameters() if p.ndim > 1}
    frozen = list_frozen(recipe, shapes)
    trained_shapes = {shapes[name] for name in shapes.keys() - frozen}
    only_frozen = {shapes[name] for name in frozen} - trained_shapes
    assert shapes["embedding"] in only_frozen  # the head's too
    with MadeShapes() as forward:
        loss, *_ = decoder.loss(*arguments_of(29), z_loss=1e-4)
    with MadeShapes() as backward:
        loss.backward()
    assert not only_frozen & (forward.shapes | {shape[::-1] for shape in forward.shapes})
    assert not only_frozen & (backward.shapes | {shape[::-1] for shape in backward.shapes})
    assert trained_shapes <= backward.shapes | {shape[::-1] for shape in backward.shapes}
    assert {
        name for name, p in decoder.named_parameters() if p.grad is not None and p.ndim > 1
    } == shapes.keys() - frozen


def test_no_gradient_reaches_a_layer_below_the_lowest_trained_one() -> None:
    recipe = recipe_with(model__layers=3, freeze=["embedding", "blocks.0-1"])
    decoder = decoder_of(recipe, torch.float32, torch.float32)
    decoder.initialise(1)
    reached: list[bool] = []
    for block in decoder.blocks:
        block.register_forward_hook(lambda block, inputs, outputs: reached.append(outputs[0].requires_grad))
    decoder.loss(*arguments_of(29), z_loss=0.0)
    assert reached == [False, False, True]


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_no_output_depends_on_the_dtype_in_which_frozen_matrices_are_held(way: str, joined: bool) -> None:
    """Nor do the gradients, to the bit."""
    recipe = recipe_with(**WAYS[way])
    made = []
    for held in (torch.float32, torch.bfloat16):
        decoder = decoder_of(recipe, torch.bfloat16, held)
        decoder.initialise(1)
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                if is_lora_tensor(name):
                    drawn = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(2))
                    parameter.copy_(drawn * 0.2 + 0.9 * (parameter.ndim == 1))
        if joined:
            decoder.join_matrices()
            assert bool(decoder.blocks[0].joined_frozen) == (held == torch.bfloat16)  # type: ignore[arg-type]
        loss, *_ = decoder.loss(*arguments_of(32), z_loss=1e-4)
        loss.backward()
        grads = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
        made.append((loss.detach(), grads))
    (one, grads_of_one), (other, grads_of_other) = made
    assert torch.equal(one, other) and grads_of_one.keys() == grads_of_other.keys()
    assert all(torch.equal(gradient, grads_of_other[name]) for name, gradient in grads_of_one.items())


def test_dora_measures_the_rows_of_the_merged_matrix() -> None:
    recipe = recipe_with(**WAYS["dora"])
    decoder = decoder_of(recipe, torch.float32, torch.float32)
    decoder.initialise(1)
    generator = torch.Generator().manual_seed(3)
    block: Any = decoder.blocks[0]
    with torch.no_grad():
        for name in ("q_lora_a", "q_lora_b"):
            parameter = getattr(block, name)
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    whole = block.q.double() + 2 * block.q_lora_b.double() @ block.q_lora_a.double()
    torch.testing.assert_close(measure_rows(block, "q").double(), whole.norm(dim=1), rtol=1e-5, atol=1e-6)


HEADS: dict[str, tuple[Any, tuple[float, ...]]] = {
    "reference": (linear_cross_entropy.reference, ()),
    "chunked": (linear_cross_entropy.chunked, ()),
    "saved_logits": (linear_cross_entropy.saved_logits, ()),
    "native": (linear_cross_entropy.native, ()),
    "soft-capped reference": (softcapped_cross_entropy.reference, (2.0,)),
    "soft-capped chunked": (softcapped_cross_entropy.chunked, (2.0,)),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_a_loss_head_computes_only_the_gradients_that_are_asked_for(name: str, wanted: tuple[bool, bool]) -> None:
    """Two products instead of three, and the gradient that is left has the same bits."""
    head, more = HEADS[name]
    generator = torch.Generator().manual_seed(1)
    N, V, D = 128, 48, 32
    given = [torch.randn(size, D, generator=generator) for size in (N, V)]
    rest = torch.randint(V, (N,), generator=generator), torch.rand(N, generator=generator) / N, 1e-3, *more
    found = []
    for asked in ((True, True), wanted):
        leaves = [tensor.clone().requires_grad_(needs) for tensor, needs in zip(given, asked)]
        with FlopCounterMode(display=False) as counter:
            loss, _ = head(*leaves, *rest)
            loss.backward()
        assert counter.get_total_flops() == 2 * N * V * D * (1 + sum(asked)), asked
        found.append((loss.detach(), [leaf.grad for leaf in leaves]))
    (loss, gradients), (alone, left) = found
    assert torch.equal(loss, alone)
    for both, one, needs in zip(gradients, left, wanted):
        assert torch.equal(both, one) if needs else one is None


@pytest.mark.parametrize("way", ["lora", "frozen"])
def test_two_ranks_in_bf16_leave_frozen_weights_as_they_are(
    tmp_path: Path, plan: DataPlan, base: Path, way: str
) -> None:
    """FSDP shards matrices of two dtypes together."""
    recipe = recipe_with(**WAYS[way], precision="bf16", compile=False)
    folder = write_spec(tmp_path / "two", plan, recipe, first_step=4, last_step=6, initial_checkpoint=str(base))
    launcher = "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"
    code, errors = run_trainer([folder], *launcher)
    assert code == 0, errors
    (path,) = (folder / "checkpoints").glob("step-*06")
    assert not find_checkpoint_fault(path)
    before, after = load_checkpoint(base).model, load_checkpoint(path).model
    frozen = list_frozen(recipe, after)
    assert frozen and {n for n in after if n in before and torch.equal(before[n], after[n])} == frozen


def test_a_start_checkpoint_that_changes_under_a_segment_is_noticed_by_its_save(tmp_path: Path) -> None:
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    path = save_checkpoint(tmp_path, Checkpoint({"w": weight}, {}, {"step": 1}))
    unchanged = describe_unchanged(path, open_weights(path, None, {}), {"w": compute_crc(weight)}, {"w": (6, 5)})
    assert torch.equal(unchanged.read("w"), weight)
    shutil.rmtree(path)
    save_checkpoint(tmp_path, Checkpoint({"w": weight.nextafter(torch.tensor(9.0))}, {}, {"step": 1}))
    with pytest.raises(CheckpointError) as found:
        unchanged.read("w")
    assert found.value.code == "trainer.frozen_weight_changed" and found.value.data["tensor"] == "w"
