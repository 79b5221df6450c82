"""The runs of the matrix at the recipe's own width and depth, beside the tiny ones of ``cases``.

Code may be right for a model of some hundred weights and wrong for the recipe's: initial weights that depend on the width, a resume that depends on
the number of layers, a limit that depends on the clip. So a few runs have the recipe's model, optimiser, stability and schedule, with short rows.
They have what the other runs have too little of: four micro-batches, four domains with drawn names, four ranks. They are in fp32 and not compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from factory.gates.patch.matrix.cases import AVERAGE, VOCABULARY, MatrixCase, MatrixTool, SizedBegin, make_case_recipe
from trainer.contract.recipe import Recipe

CONTEXT = 24
# Above this number of weights, a run takes longer than all tiny runs. Below it, nothing is made smaller. (demo has 4.5 million.)
MOST_WEIGHTS = 6_000_000
ROUNDING = (
    2e-2  # only sums over all tensors are compared, because of millions of weights some have a gradient near zero
)
SIZED: SizedBegin = "sized"
SIZED_OUTLIERS: SizedBegin = "sized outliers"


@dataclass(frozen=True)
class SizedRuns:
    """trunk: the run whose checkpoints the other runs start from. cases: the runs of each side. tools: the programs."""

    trunk: MatrixCase
    cases: tuple[MatrixCase, ...]
    tools: tuple[MatrixTool, ...]


def make_sized_runs(recipe: Mapping[str, Any]) -> SizedRuns | None:
    """Return the runs at the size of ``recipe``; None if a model of this width and depth is too large even with the smallest heads and MLP."""
    model = fit_model(recipe["model"])
    if model is None:
        return None
    whole = {key: dict(recipe[key]) for key in ("optimizer", "stability", "schedule")}
    changes = whole | {
        "model": model, "batch": {"sequences": 8, "micro_sequences": 2, "packing": recipe["batch"]["packing"]}, "keep_checkpoints": 2,
    }  # fmt: skip

    common: dict[str, Any] = {"changes": changes, "drawn_domains": True, "rounding": ROUNDING, "totals": True}
    return SizedRuns(
        MatrixCase("recipe size, trunk", steps=4, **common),
        (
            MatrixCase("recipe size, resumed", steps=4, stop_after=2, **common),
            MatrixCase("recipe size, anneal", SIZED, "anneal", steps=3, **common),
            MatrixCase("recipe size, outliers", SIZED_OUTLIERS, steps=2, **common),
            MatrixCase("recipe size, four ranks", SIZED, steps=2, ranks=4, **common),
        ),
        (MatrixTool(AVERAGE, ("OUT/checkpoints", "SIZEDFIRST", "SIZEDLAST", "--weights", "1,3")),),
    )


def fit_model(model: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a model with the same width and depth and short rows. Vocabulary, MLP, heads and experts are made smaller until it has few weights."""
    found = dict(model) | {"context": min(CONTEXT, model["context"])}
    for smaller in (None, *_shrinks(model)):
        found |= smaller or {}
        if Recipe.parse(make_case_recipe({"model": found})).model.parameters <= MOST_WEIGHTS:
            return found
    return None


def _shrinks(model: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"vocab_size": min(model["vocab_size"], 8 * VOCABULARY)}
    if model.get("experts"):
        yield {"experts": model["experts"] | {"d_ff": min(model["experts"]["d_ff"], 16)}}
    yield {"d_ff": min(model["d_ff"], 64)}
    if not model.get("latent"):
        yield {"heads": 1, "kv_heads": 1}
        yield {"head_dim": min(model["head_dim"], 16)}
    yield {"vocab_size": VOCABULARY}
    yield {"d_ff": min(model["d_ff"], 16)}
