"""The faults that the doctor is tried on, each with the cause that it should name, and healthy runs that it should leave alone.

A fault is in the data, in the recipe, in the checkpoint, or in what computes: then ``injected`` acts on the gradients of a step, in the live run or
in replays too, as the fault would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from trainer.contract.data.token_shard import TokenizedDocument

VOCABULARY = 512
Documents = list[TokenizedDocument]
Act = Callable[[dict[str, Tensor], np.random.Generator], None]


@dataclass(frozen=True)
class Doing:
    """What runs: for a fault in what computes."""

    live: bool
    step: int
    reference: bool
    precision: str
    faulty_code: bool


@dataclass(frozen=True)
class Fault:
    name: str
    causes: tuple[tuple[str, ...], ...]  # the answers that count as right; empty: healthy, no anomaly is allowed
    joins: Callable[[np.random.Generator], Documents] | None = None  # documents that join as a new generation
    recipe: Mapping[str, Any] = field(default_factory=dict)  # of the whole run, keys with dots
    later: Mapping[str, Any] = field(default_factory=dict)  # from the second segment on
    injects: Callable[[Doing], bool] | None = None
    act: Act | None = None
    checkpoint: Act | None = (
        None  # changes the checkpoint that the second segment starts from (model and optimiser tensors)
    )
    kind: str = "trunk"  # of the second segment

    @property
    def healthy(self) -> bool:
        return not self.causes


def document(key: str, tokens: np.ndarray, domain: str = "code") -> TokenizedDocument:
    tokens = np.asarray(tokens, np.uint32)
    return TokenizedDocument(key, key, domain, "test", "none", tokens, np.ones(len(tokens), bool))


def walk(rng: np.random.Generator, length: int, step: int = 7) -> np.ndarray:
    """Tokens of a document that can be learnt: a noisy walk."""
    return (rng.integers(3, VOCABULARY) + step * np.arange(length) + rng.integers(0, 3, length)) % VOCABULARY


def good(rng: np.random.Generator, count: int, name: str = "good") -> Documents:
    return [document(f"{name}-{i}", walk(rng, int(rng.integers(20, 90)))) for i in range(count)]


def with_bad(make: Callable[[np.random.Generator], np.ndarray], bad: int) -> Callable[[np.random.Generator], Documents]:
    return lambda rng: good(rng, 600) + [document(f"bad-{i}", make(rng)) for i in range(bad)]


def scaled(by: float) -> Act:
    """Of one matrix's gradient."""

    def act(gradients: dict[str, Tensor], rng: np.random.Generator) -> None:
        gradients["blocks.0.down"].mul_(by)

    return act


def one_element(gradients: dict[str, Tensor], rng: np.random.Generator) -> None:
    flat = gradients["blocks.1.gate"].view(-1)
    flat[int(rng.integers(len(flat)))] = 2.0**16


def noise(gradients: dict[str, Tensor], rng: np.random.Generator) -> None:
    flat = gradients["blocks.0.down"].view(-1)
    flat[int(rng.integers(len(flat)))] += float(np.random.default_rng().normal()) * 2.0**8


def no_moments(tensors: dict[str, Tensor], rng: np.random.Generator) -> None:
    for key, tensor in tensors.items():
        if key.startswith(("exp_avg.", "exp_avg_sq.")):
            tensor.zero_()


def one_weight(tensors: dict[str, Tensor], rng: np.random.Generator) -> None:
    flat = tensors["blocks.0.down"].view(-1)
    flat[int(rng.integers(len(flat)))] = 2.0**9


FIRST, LAST = 80, 120  # where the second segment begins and ends
AT = FIRST + 15  # the step at which a fault of what computes acts
FAULTS = (
    Fault("repeated n-grams", (("bad data",),), with_bad(lambda rng: np.full(60, 7), 12)),
    Fault("base64 blob", (("bad data",),), with_bad(lambda rng: rng.integers(3, VOCABULARY, 300), 40)),
    Fault("rate × 300", (("rate",),), later={"optimizer.lr": 3.0}),
    Fault("flipped bit in a gradient", (("hardware",),), injects=lambda d: d.live and d.step == AT, act=one_element),
    Fault("flipped bit in a weight", (("state lost on resume", "hardware"), ("hardware",)), checkpoint=one_weight),
    Fault("moments lost on resume", (("state lost on resume",),), recipe={"optimizer.beta1": 0.0, "optimizer.beta2": 0.999}, checkpoint=no_moments),
    Fault("wrong backward of a kernel", (("faulty kernel",),), injects=lambda d: d.step >= AT and not d.reference, act=scaled(3000.0)),
    Fault("wrong code in a commit", (("code change",),), injects=lambda d: d.step >= AT and d.faulty_code, act=scaled(3000.0)),
    Fault(
        "overflow in bf16", (("numeric precision",),), None, {"precision": "bf16"},
        injects=lambda d: d.step >= AT and d.precision == "bf16", act=scaled(3000.0),
    ),
    Fault("a device that is always wrong", (("hardware",),), injects=lambda d: d.step >= AT, act=noise),
    Fault("healthy: nothing happens", ()),
    Fault("healthy: a new generation", (), lambda rng: [document(f"new-{i}", walk(rng, int(rng.integers(20, 90)), 11)) for i in range(600)]),
    Fault("healthy: decay", (), kind="anneal"),
)  # fmt: skip
