"""Traces a step with the default implementations of a GPU, without a GPU. Tensors have shapes but no values, so no kernel runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.contract.choice import UNTUNED, find_default_implementation, split_implementation_names
from kernels.contract.op import LazilyImportedFunction
from kernels.contract.registry import OPS, Ops, find_implementation, return_documents_unchanged
from tests.support.paths import ROOT
from trainer.contract.recipe import Recipe, copy_with_changed_keys
from trainer.model.transformer import Decoder

B, T, V = 2, 120, 640  # sizes that no other tensor has
STRETCHES = 64


def ops_of(choice: dict[str, str]) -> Ops:
    chosen = {name: OPS[name].implementations[choice[name]] for name in OPS}
    for one in chosen.values():  # as the trial of ``bind_ops`` does
        for function in (one.function, one.prepare):
            if isinstance(function, LazilyImportedFunction):
                function.load()
    functions = {name: one.function for name, one in chosen.items()}
    return Ops(**functions, prepare_attention=chosen["attention"].prepare or return_documents_unchanged)


def defaults(machine: str) -> dict[str, str]:
    return {name: split_implementation_names(find_default_implementation(name, machine))[0] for name in OPS}


def decoder(choice: dict[str, str], **keys: Any) -> Decoder:
    raw = Recipe.load(ROOT / "policies" / "recipes" / "tiny.yaml").model_dump()
    recipe = Recipe.parse(copy_with_changed_keys(raw, {"model.context": T, "model.vocab_size": V, **keys}))
    with torch.device("meta"):
        return Decoder(recipe.model, ops_of(choice), torch.bfloat16)


def step(model: Decoder, stretches: int = STRETCHES) -> None:
    whole = {name: torch.zeros(B, T, dtype=torch.int64, device="meta") for name in ("tokens_BT", "targets_BT", "positions_BT")}  # fmt: skip
    documents, weights = (torch.zeros(B, T, dtype=dtype, device="meta") for dtype in (torch.int32, torch.float32))
    loss, nll_BT, _ = model.loss(**whole, documents_BT=documents, weights_BT=weights, z_loss=1e-4, stretches=stretches)
    loss.backward()
    assert loss.dtype == torch.float32 and nll_BT.shape == (B, T)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


class Largest(TorchDispatchMode):
    """Every shape that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(x.shape) for x in tree_leaves(out) if isinstance(x, Tensor)}
        return out


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_every_default_implementation_exists_and_runs_on_its_device_class() -> None:
    for device, rows in UNTUNED.items():
        for row in rows.values():
            for op, choice in row.items():
                for name in split_implementation_names(choice):
                    find_implementation(op, name, device)
    assert find_default_implementation("attention", "cuda-sm120-x") == find_default_implementation(
        "attention", "cuda-sm100-x"
    )
    assert find_default_implementation("attention", "cuda-sm75-tesla-t4") == "reference"


@pytest.mark.parametrize("machine", ["cuda-sm80-a100", "cuda-sm90-h100", "cuda-sm100-b200"])
def test_a_step_makes_no_dense_mask_and_no_logits_of_the_whole_batch(machine: str) -> None:
    def shapes(choice: dict[str, str]) -> set[tuple[int, ...]]:
        model = decoder(choice)
        with Largest() as seen:
            step(model)
        return seen.shapes

    square, logits = (lambda s: s[-2:] == (T, T)), (lambda s: s[-2:] == (B * T, V))
    found = shapes(defaults(machine))
    assert not [s for s in found if square(s) or logits(s)]
    plain = shapes(dict.fromkeys(OPS, "reference"))  # the control: the reference holds both
    assert [s for s in plain if square(s)] and [s for s in plain if logits(s)]


@pytest.mark.sample("False-False", "True-True")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.slow("compiles a block")
def test_a_block_compiles_to_one_graph(recompute: bool, experts: bool) -> None:
    """There is no graph break. Layers and batches share the graph. A larger bound of stretches compiles one more graph."""
    keys = {"model.experts": {"count": 4, "per_token": 2, "d_ff": 16, "dense_layers": 1}} if experts else {}
    model = decoder(defaults("cuda-sm90-h100"), **keys)
    if recompute:
        model.use_recomputation()
    counted = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.run = torch.compile(block.run, dynamic=False, fullgraph=True, backend=counted)  # type: ignore[assignment,arg-type]
    kinds = len({block.experts is None for block in model.blocks})
    step(model)
    assert counted.frame_count == kinds
    step(model)
    assert counted.frame_count == kinds
    step(model, 2 * STRETCHES)
    assert counted.frame_count == 2 * kinds


def test_flex_attention_takes_blocks_made_outside_of_the_compiled_block() -> None:
    """Only the forward pass is traced: torch cannot trace the backward pass of FlexAttention without a device."""
    choice = defaults("cuda-sm90-h100") | {"attention": "flex"}
    with torch._subclasses.FakeTensorMode():
        ops = ops_of(choice)
        documents = torch.zeros(B, T, dtype=torch.int32)
        seen = ops.prepare_attention(documents, STRETCHES)
        q, k = (torch.zeros(B, T, heads, 16, dtype=torch.bfloat16) for heads in (4, 2))
        counted = CompileCounterWithBackend("aot_eager")

        @torch.compile(backend=counted, fullgraph=True)
        def layer(q: Tensor, k: Tensor, seen: Any) -> Tensor:
            return 2 * ops.attention(q, k, k, seen)

        with torch.no_grad():
            assert layer(q, k, seen).shape == q.shape and layer(q, k, seen).shape == q.shape
        assert counted.frame_count == 1
