"""How the last stage sees weights: the judge's own model of them, under every recipe that the trainer knows."""

from __future__ import annotations

import pytest
import torch

from factory.gates.held_out import reference_model
from factory.gates.patch_training import alone
from kernels.registry import bind
from tests.trainer.conftest import recipe_with
from tests.trainer.families import FAMILIES, ODD
from trainer.errors import RecipeError
from trainer.model import Decoder
from trainer.recipe import Recipe


@pytest.mark.parametrize("family", FAMILIES)
def test_the_judges_model_of_a_checkpoint_is_the_trainers(family: str) -> None:
    recipe = recipe_with(**(ODD | FAMILIES[family][1]))
    trained = Decoder(recipe.model, bind({}), torch.float32)
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
    found = reference_model(weights, recipe.model_dump()).logits(tokens)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_recipe_of_many_ranks_runs_alone_in_the_sandbox() -> None:
    many = recipe_with(parallel={"tensor": 2, "replicas": 2, "recompute": "block"}).model_dump()
    parsed = Recipe.parse(many)
    with pytest.raises(RecipeError, match="parallel.tensor"):
        parsed.parallel.data_ranks(1, parsed.model)
    found = Recipe.parse(alone(many))
    assert found.parallel.data_ranks(1, found.model) == 1 and found.parallel.recompute == "block"
    assert found.model_copy(update={"parallel": parsed.parallel}) == parsed
    assert Recipe.parse(alone({k: v for k, v in many.items() if k != "parallel"})).parallel.tensor == 1
