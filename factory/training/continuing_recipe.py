"""Writes the recipe with which an imported model is trained further: its own shape, and rates for continuing.

The learning rate rises again from zero (re-warming) and then stays at the peak until an anneal, because continued training with a rate that rises
again and with replay of earlier data comes near to training anew (arXiv 2403.08763 §6; the trunk's constant rate is its "infinite" schedule, §7).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from factory.ingest.rules.policy import REPLAY_DOMAIN
from kernels.contract.message import Message
from models.spec import ModelSpec

# Peak rates and batch sizes of pre-training by the number of weights (GPT-3, arXiv 2005.14165, Table 2.1). arXiv 2403.08763 re-warms to rates of
# this table: 3e-4 at 405 million weights, 1.2e-4 at 10 billion.
PRE_TRAINING = (  # (weights, rate, tokens of a batch)
    (125e6, 6.0e-4, 0.5e6),
    (350e6, 3.0e-4, 0.5e6),
    (760e6, 2.5e-4, 0.5e6),
    (1.3e9, 2.0e-4, 1e6),
    (2.7e9, 1.6e-4, 1e6),
    (6.7e9, 1.2e-4, 2e6),
    (13e9, 1.0e-4, 2e6),
    (175e9, 0.6e-4, 3.2e6),
)
RATE_COMMENT = Message(
    "continuing_recipe.rate",
    "# The rate of continuing: arXiv 2403.08763 (re-warming), 2005.14165 Table 2.1 (rate by size), 2205.10287 (square root of the batch).",
)
EXPORT_KEYS = ("export_dtype", "export_dtypes")
STEP_TOKENS = 16_384  # of a batch
MICRO_TOKENS = 4_096  # at most, of a forward and backward pass
USUAL_CONTEXT = 2_048  # positions in a row, if the model allows more
REPLAY_SHARE = 0.25  # of the tokens, as for data that are far from the old ones (arXiv 2403.08763 §6)
SCHEDULE = {"warmup_steps": 20, "trunk_steps": {"first": 200, "later": 100}, "anneal_steps": 50}


@dataclass(frozen=True)
class ContinuingRecipe:
    """A recipe's name and its text."""

    name: str
    text: str


def compute_continuing_rate(weights: float, step_tokens: int) -> float:
    """The peak learning rate for continuing a model of so many weights with batches of so many tokens.

    It is the rate of ``PRE_TRAINING``, linear in the logarithms, times √(batch / batch of the table), at most one: AdamW's rate follows the square
    root of the batch (arXiv 2205.10287 §4).

    >>> [f"{compute_continuing_rate(weights, tokens):.1e}" for weights, tokens in ((134e6, 16_384), (405e6, 1 << 20), (7e9, 1 << 22), (1e6, 512))]
    ['1.0e-04', '2.9e-04', '1.2e-04', '1.9e-05']
    """
    table = PRE_TRAINING
    at = min(max(weights, table[0][0]), table[-1][0])
    upper = next(n for n, row in enumerate(table) if row[0] >= at)
    (w0, r0, b0), (w1, r1, b1) = table[max(0, upper - 1)], table[upper]
    share = 0.0 if w1 == w0 else math.log(at / w0) / math.log(w1 / w0)
    between = lambda a, b: math.exp(math.log(a) + share * (math.log(b) - math.log(a)))
    return between(r0, r1) * min(1.0, math.sqrt(step_tokens / between(b0, b1)))


def make_continuing_recipe(
    name: str,
    spec: ModelSpec,
    dtypes: Mapping[str, Any],
    source: str,
    context: int | None = None,
    replay: bool = False,
    micro_tokens: int = MICRO_TOKENS,
) -> ContinuingRecipe:
    """The recipe of an imported model. ``dtypes``: the keys for those of its weights. ``source``: where it is from, for a comment.

    ``context``: positions in a row; None: as many as the model allows, at most ``USUAL_CONTEXT``. ``replay``: give the domain 'replay' its share.
    ``micro_tokens``: at most so many tokens in a micro-batch, which has one row at least.
    """
    allowed = spec.context
    rows = min(allowed, context or USUAL_CONTEXT)
    model = spec.model_dump() | {"context": rows, "max_positions": allowed}  # the second also if equal: rows may change
    fields = ModelSpec.model_fields
    model = {key: value for key, value in model.items() if fields[key].is_required() or value != fields[key].default}
    sequences = max(4, STEP_TOKENS // rows)
    micro = next(
        size for size in range(sequences, 0, -1) if sequences % size == 0 and (size * rows <= micro_tokens or size == 1)
    )
    rate = float(f"{compute_continuing_rate(spec.parameters, sequences * rows):.2g}")
    weights = {"*": 1.0 - REPLAY_SHARE, REPLAY_DOMAIN: REPLAY_SHARE} if replay else {"*": 1.0}
    sections: list[tuple[str, dict[str, Any]]] = [
        (
            Message("continuing_recipe.heading", "# An imported model, trained further: {source}", source=source),
            {"name": name, "seed": 1, "precision": "auto", "compile": True, "checkpoint_every": 50},
        ),
        (
            Message("continuing_recipe.dtypes", "# An export has the dtypes of the imported model."),
            {key: dtypes[key] for key in EXPORT_KEYS if dtypes.get(key)},
        ),
        (
            Message("continuing_recipe.model", "# The shape is the imported model's. Another function is refused."),
            {"model": model},
        ),
        (
            Message(
                "continuing_recipe.replay",
                "# A share of each batch is of the domain {domain}: documents like those that the model knew.",
                domain=REPLAY_DOMAIN,
            )
            if replay
            else "",
            {"mixture": {"weights": weights, "replay": 0.3, "max_epochs": 4}},
        ),
        ("", {"batch": {"sequences": sequences, "micro_sequences": micro}}),
        (RATE_COMMENT, {"optimizer": {"lr": rate, "weight_decay": 0.1}}),
        (
            Message(
                "continuing_recipe.schedule", "# The rate rises over warmup_steps, stays, and falls in each anneal."
            ),
            {"schedule": SCHEDULE},
        ),
    ]
    lines = []
    for comment, section in sections:
        lines += [f"{comment}\n"] if comment else []
        lines.append(yaml.safe_dump(section, sort_keys=False, default_flow_style=False))
    return ContinuingRecipe(name, "".join(lines))


def make_recipe_name(source: str) -> str:
    """A recipe's name from the name of a model's folder or file.

    >>> make_recipe_name("SmolLM2-135M-Instruct.Q4_1"), make_recipe_name("--")
    ('smollm2-135m-instruct-q4-1', 'imported')
    """
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in source.lower())
    return "-".join(filter(None, plain.split("-")))[:60].strip("-") or "imported"
