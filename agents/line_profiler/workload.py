"""Makes a run to profile: the recipe's own model, optimiser and data order, on a token shard of random documents.

The time of a step depends on the lengths of documents and on how many tokens carry loss, not on the tokens. The lengths are log-normal with
a median of 250 tokens. A third of the documents are chats, whose first 60 % carry no loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from models.shrinking import shrink_spec
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.token_shard import TokenizedDocument, write_token_shard
from trainer.contract.lora import fit_to_smaller_model
from trainer.contract.plan.precision import choose_training_device, replace_auto_precision
from trainer.contract.plan.spec import SegmentSpec
from trainer.contract.recipe import Recipe
from trainer.parallel.ranks import Ranks
from trainer.run import SegmentRun

MEDIAN_TOKENS = 250


def make_segment_run(
    recipe: Recipe, kernels: Path, folder: Path, *, steps: int, compile: bool, whole_rows: bool = False
) -> SegmentRun:
    """A fresh run of ``steps`` steps with its token shard in ``folder``. ``compile`` overrides the recipe. Without
    compilation, every step executes its Python lines and replays no CUDA graph. ``precision: auto`` means the fastest precision on this
    device. ``whole_rows``: each document fills a row and every token carries loss, as in most published measurements.

    Raises: TrainerError, KernelError.
    """
    recipe = replace_auto_precision(recipe, choose_training_device()).model_copy(update={"compile": compile})
    recipe = recipe if compile else recipe.model_copy(update={"cuda_graphs": "off"})
    wanted = steps * recipe.tokens_per_step * 2
    shard = write_token_shard(
        folder,
        make_random_documents(recipe, wanted, whole_rows),
        vocab_size=recipe.model.vocab_size,
        tokenizer_sha256="0" * 64,
    )
    mixture = recipe.mixture.model_copy(update={"weights": {"*": 1.0}, "phases": [], "max_epochs": 4})
    plan = DataPlan.make_for_segment(mixture, "trunk", [(shard.id, str(shard.path), 0)], recipe.seed)
    spec = SegmentSpec(kind="trunk", recipe=recipe, data_plan=plan, first_step=0, last_step=steps, kernels=str(kernels))
    return SegmentRun(spec, Ranks.join(recipe.parallel, recipe.model), None)


def shrink_recipe(recipe: Recipe) -> Recipe:
    """The recipe with few narrow layers of each kind and eight short rows: the same lines, over tensors of a few kilobytes."""
    model = shrink_spec(
        recipe.model, layers=2, context=32, kv_heads=2, head_dim=16, d_model=32, vocab_size=512, experts=2
    )
    batch = recipe.batch.model_copy(update={"sequences": 8, "micro_sequences": None, "warmup": []})
    adapt, freeze = fit_to_smaller_model(model, recipe.adapt, recipe.freeze)
    return recipe.model_copy(
        update={"model": model, "batch": batch, "adapt": adapt, "freeze": freeze, "export_dtypes": {}}
    )


def make_random_documents(recipe: Recipe, tokens: int, whole_rows: bool = False) -> Iterator[TokenizedDocument]:
    """Random documents with ``tokens`` tokens in all, or a little more. A document of T + 1 tokens fills a row of T positions."""
    generator = np.random.default_rng(recipe.seed)
    made = number = 0
    while made < tokens:
        length = int(np.clip(generator.lognormal(np.log(MEDIAN_TOKENS), 0.8), 8, 4096))
        length = recipe.model.context + 1 if whole_rows else length
        mask = np.ones(length, np.bool_)
        if number % 3 == 0 and not whole_rows:
            mask[: int(length * 0.6)] = False
        ids = generator.integers(0, recipe.model.vocab_size, length, dtype=np.uint32)
        yield TokenizedDocument(
            f"{number:08d}", f"profile-{number}", "chat" if number % 3 == 0 else "text", "profile", "none", ids, mask
        )
        made, number = made + length, number + 1
