"""How the last stages of the patch gate read the files of a training: the weights in the judge's own model, and the state from which a run
continues."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from factory.gates.patch.checkpoint_difference import compute_squared_moment_distances, find_checkpoint_difference
from factory.gates.patch.held_out_scores import make_reference_model
from factory.runs.arm import make_recipe_for_one_rank
from factory.runs.trace import read_live_checkpoint
from factory.runs.trainer_folder import write_spec_into_open_folder
from factory.runs.untrusted_files import UntrustedFileError
from kernels.contract.registry import bind_ops
from tests.support.gates.reasons import Expected, expect, tells
from tests.support.messages import refused
from tests.support.trainer.families import FAMILIES, ODD
from tests.support.trainer.segments import recipe_with
from trainer.contract.checkpoint.format import REGIONS, Checkpoint, save_checkpoint
from trainer.contract.data.token_shard import hash_file
from trainer.contract.errors import RecipeError
from trainer.contract.recipe import Recipe
from trainer.model.transformer import Decoder


@pytest.mark.parametrize("family", FAMILIES)
def test_the_judges_model_computes_the_same_as_the_trainers_model(family: str) -> None:
    recipe = recipe_with(**(ODD | FAMILIES[family][1]))
    trained = Decoder(recipe.model, bind_ops({}), torch.float32)
    trained.initialise(seed=4)
    generator = torch.Generator().manual_seed(5)
    weights = trained.state_dict()
    for name, tensor in weights.items():  # norms off one, biases off zero
        if tensor.ndim == 1:
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.2)
        elif name == "embedding":
            tensor.mul_(20)
    tokens = torch.randint(512, (3, 32), generator=generator)
    positions, documents = torch.arange(32).expand(3, -1), torch.zeros(3, 32, dtype=torch.int32)
    with torch.no_grad():
        expected = trained.logits(tokens, positions, documents)
    assert float(expected.abs().max()) > 1
    found = make_reference_model(weights, recipe.model_dump()).logits(tokens)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_recipe_for_many_ranks_is_changed_to_one_rank_for_the_sandbox() -> None:
    many = recipe_with(parallel={"tensor": 2, "replicas": 2, "recompute": "block"}).model_dump()
    parsed = Recipe.parse(many)
    with pytest.raises(RecipeError, match="parallel.tensor"):
        parsed.parallel.data_ranks(1, parsed.model)
    found = Recipe.parse(make_recipe_for_one_rank(many))
    assert found.parallel.data_ranks(1, found.model) == 1 and found.parallel.recompute == "block"
    assert found.model_copy(update={"parallel": parsed.parallel}) == parsed
    assert (
        Recipe.parse(make_recipe_for_one_rank({k: v for k, v in many.items() if k != "parallel"})).parallel.tensor == 1
    )


# -- the rest of a checkpoint ----------------------------------------------------------------------------------------------
STEP = 12
WEIGHTS = {"w": torch.ones(4)}
STATE: dict[str, Any] = {
    "step": STEP,
    "kind": "trunk",
    "first_step": 6,
    "data_plan": "p",
    "sampler": {"rows": [1]},
    "detector": {"grad_norm": [0.5, 0.6], "best": None, "told": []},
    "recipe": {"compile": True, "batch": {"sequences": 8, "micro_sequences": None}, "seed": 1},
    "counters": {"seconds": 1},
}


def optimizer(off: float = 0.0, **others: Any) -> dict[str, torch.Tensor]:
    moments = {"exp_avg.w": torch.ones(4) + off, "exp_avg_sq.w": torch.full((4,), 1e-6) + 1e-6 * off}
    return moments | {"step.w": torch.tensor(12.0), "rng": torch.zeros(2, dtype=torch.uint8)} | others


def written(folder: Path, tensors: dict[str, torch.Tensor], **state: Any) -> Path:
    return save_checkpoint(folder / "checkpoints", Checkpoint(WEIGHTS, tensors, STATE | state))


def left_in(folder: Path) -> Checkpoint:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return read_live_checkpoint(descriptor, STEP, WEIGHTS)
    finally:
        os.close(descriptor)


def test_read_tensors_are_not_views_of_a_file(tmp_path: Path) -> None:
    written(tmp_path, optimizer())
    left = left_in(tmp_path)
    assert (
        left.model.keys() == WEIGHTS.keys() and "model.safetensors (deleted)" not in Path("/proc/self/maps").read_text()
    )


@pytest.mark.parametrize("regions", ["[]", "1", '"x"', '{"w": 7}', "{"])
def test_a_checkpoint_with_odd_regions_is_refused_as_untrusted(tmp_path: Path, regions: str) -> None:
    """The error is an expected one: an unexpected error would hold the patch instead of rejecting it."""
    path = written(tmp_path, optimizer()) / "model.safetensors"
    save_file(WEIGHTS, path, metadata={REGIONS: regions})
    manifest = json.loads((path.parent / "manifest.json").read_text())
    manifest["files"][path.name] = {"bytes": path.stat().st_size, "sha256": hash_file(path)}
    (path.parent / "manifest.json").write_text(json.dumps(manifest))
    with refused("runs.no_checkpoint", UntrustedFileError, step=12):
        left_in(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "state", "expected"),
    [
        (optimizer(0.02), {"counters": {"seconds": 9}}, None),  # rounding, and a clock
        (optimizer(rng=torch.ones(2, dtype=torch.uint8)), {}, None),
        (optimizer(0.06), {}, expect("patch.optimiser_apart", kind="exp_avg", share=0.6, most=0.5)),
        (
            optimizer(**{"exp_avg_sq.w": torch.zeros(4)}),
            {},
            expect("patch.optimiser_apart", kind="exp_avg_sq", share=10.0),
        ),  # however small beside the others
        (
            optimizer(**{"exp_avg.w": torch.ones(4) * torch.nan}),
            {},
            expect("patch.optimiser_apart", kind="exp_avg", share=math.inf),
        ),
        (optimizer(**{"exp_avg.w": torch.ones(2)}), {}, expect("patch.optimiser_shape", tensor="exp_avg.w")),
        ({"rng": torch.zeros(2, dtype=torch.uint8)}, {}, expect("patch.optimiser_shape", tensor="exp_avg.w")),
        (optimizer(**{"step.w": torch.tensor(0.0)}), {}, expect("patch.optimiser_step", tensor="step.w")),
        (optimizer(), {"sampler": {"rows": [0]}}, expect("patch.state_differs", keys=["sampler"])),
        (optimizer(), {"detector": {"grad_norm": [0.51, 0.6], "best": None, "told": []}}, None),
        (
            optimizer(),
            {"detector": {"grad_norm": [1e-6, 0.6], "best": None, "told": []}},
            expect("patch.state_differs", keys=["detector"]),
        ),
        (
            optimizer(),
            {"detector": {"grad_norm": [0.5], "best": None, "told": []}},
            expect("patch.state_differs", keys=["detector"]),
        ),
        (
            optimizer(),
            {"recipe": STATE["recipe"] | {"compile": False, "batch": {"sequences": 8, "micro_sequences": 4}}},
            None,
        ),
        (
            optimizer(),
            {"recipe": STATE["recipe"] | {"batch": {"sequences": 4, "micro_sequences": None}}},
            expect("patch.state_differs", keys=["recipe"]),
        ),
        (optimizer(), {"recipe": 7}, expect("patch.state_differs", keys=["recipe"])),
    ],
)
def test_checkpoints_are_compared_in_weights_optimizer_and_state(
    tmp_path: Path, tensors: dict[str, torch.Tensor], state: dict[str, Any], expected: Expected | None
) -> None:
    written(tmp_path / "a", tensors, **state)
    written(tmp_path / "b", optimizer())
    written(tmp_path / "c", optimizer(0.1))
    ours, theirs, fewer = (left_in(tmp_path / name) for name in "abc")
    found = find_checkpoint_difference(ours, theirs, compute_squared_moment_distances(fewer, theirs), 0.5)
    assert tells([found], expected) if found and expected else found == expected, found


def linked(folder: Path) -> None:
    (folder / "state.json").rename(folder / "elsewhere")
    (folder / "state.json").symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "state.json").write_text("{}"), "state.json has 2 bytes, but its manifest says"),
        (
            lambda folder: (folder / "model.safetensors").open("r+b").write(b"0"),
            "differs from the one in manifest.json",
        ),
        (lambda folder: (folder / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
        (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "nested too deeply"),
        (
            lambda folder: (folder / "manifest.json").write_text('{"format": 2, "files": {}}'),
            "does not list state.json",
        ),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json is damaged"),
        (linked, "state.json is missing"),
        (lambda folder: os.truncate(folder / "state.json", 1 << 27), "bytes; at most"),
        (shutil.rmtree, "is missing"),
    ],
)
def test_a_damaged_checkpoint_counts_as_missing(tmp_path: Path, spoil: Callable[[Path], Any], words: str) -> None:
    spoil(written(tmp_path, optimizer()))
    with refused("runs.no_checkpoint", UntrustedFileError) as error:
        left_in(tmp_path)
    assert words in str(error.value) and str(tmp_path) not in str(error.value)


@pytest.mark.parametrize(
    ("weights", "code", "tensor"),
    [
        ({"w": torch.ones(5)}, "runs.other_weights", "w"),
        ({"w": torch.ones(4, dtype=torch.float64)}, "runs.other_weights", "w"),
        ({}, "runs.other_weights", "w"),
        (WEIGHTS | {"v": torch.ones(4)}, "runs.other_weights", "v"),
        ({"w": torch.full((4,), math.nan)}, "runs.weights_not_finite", "w"),
        ({"w": torch.full((4,), math.inf)}, "runs.weights_not_finite", "w"),
    ],
)
def test_weights_of_another_model_are_refused(
    tmp_path: Path, weights: dict[str, torch.Tensor], code: str, tensor: str
) -> None:
    save_checkpoint(tmp_path / "checkpoints", Checkpoint(weights, optimizer(), STATE))
    with refused(code, UntrustedFileError, tensor=tensor):
        left_in(tmp_path)


def test_the_spec_of_a_run_appears_complete(tmp_path: Path) -> None:
    """A trainer that waits reads the file as soon as it has its name."""
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        write_spec_into_open_folder(folder, {"seed": 7})
    finally:
        os.close(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["segment.json"]
    assert json.loads((tmp_path / "segment.json").read_text()) == {"seed": 7}
