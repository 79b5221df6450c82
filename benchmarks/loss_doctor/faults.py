"""The faults that the doctor is tried on, each with the cause that it should name, and healthy runs that it should leave alone.

A fault is in the data, in the recipe, in the checkpoint, or in what computes: then ``injected`` acts on the gradients of a step, in the live run or
in replays too, as the fault would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor

from benchmarks.loss_doctor.documents import (
    VOCABULARY,
    Documents,
    chat_and_code,
    chats,
    docs,
    document,
    escapes,
    good,
    secrets,
    two_domains,
    two_levels,
    walk,
    with_bad,
    with_escapes,
    with_secrets,
)

Act = Callable[[dict[str, Tensor], np.random.Generator], None]


@dataclass(frozen=True)
class Doing:
    """What runs: for a fault in what computes."""

    live: bool
    step: int
    reference: bool
    precision: str
    faulty_code: bool
    changed_environment: bool  # is it not that of the segment before?
    accumulates: bool  # are there several micro-batches?
    documents: frozenset[str]  # of the batch, that carry loss
    updates: int  # that the weights have had


@dataclass(frozen=True)
class Fault:
    name: str
    causes: tuple[tuple[str, ...], ...]  # the answers that count as right; empty: healthy, no anomaly is allowed
    joins: Callable[[np.random.Generator], Documents] | None = None  # documents that join as a new generation
    base: Callable[[np.random.Generator], Documents] | None = None  # those of the first segment; None: ``good``
    recipe: Mapping[str, Any] = field(default_factory=dict)  # of the whole run, keys with dots
    later: Mapping[str, Any] = field(default_factory=dict)  # from the second segment on
    weights: Mapping[str, float] = field(default_factory=lambda: {"*": 1.0})  # shares of the domains
    phases: tuple[tuple[int, Mapping[str, float]], ...] = ()  # from a step on
    replay: float = 0.5
    injects: Callable[[Doing], bool] | None = None
    act: Act | None = None
    checkpoint: Act | None = (
        None  # changes the checkpoint that the second segment starts from (model and optimiser tensors)
    )
    shuffled: bool = True  # False: documents that join come in the order of their shard, until they are reshuffled
    dependency: Literal["", "at hand", "gone"] = (
        ""  # one changed with the second segment; is the environment before it left?
    )
    kind: str = "trunk"  # of the second segment
    last: int = 0  # its last step; 0: LAST

    @property
    def healthy(self) -> bool:
        return not self.causes

    @property
    def until(self) -> int:
        return self.last or LAST


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


def zero(prefixes: tuple[str, ...]) -> Act:
    def act(tensors: dict[str, Tensor], rng: np.random.Generator) -> None:
        for key, tensor in tensors.items():
            if key.startswith(prefixes):
                tensor.zero_()

    return act


def one_weight(tensors: dict[str, Tensor], rng: np.random.Generator) -> None:
    flat = tensors["blocks.0.down"].view(-1)
    flat[int(rng.integers(len(flat)))] = 2.0**9


def one_moment(tensors: dict[str, Tensor], rng: np.random.Generator) -> None:
    flat = tensors["exp_avg.blocks.0.down"].view(-1)
    flat[int(rng.integers(len(flat)))] = 2.0**18


def underflow(tensors: dict[str, Tensor], rng: np.random.Generator) -> None:
    """Second moments below the smallest normal number of fp16 become zero."""
    for key, tensor in tensors.items():
        if key.startswith("exp_avg_sq."):
            tensor[tensor < 2.0**-14] = 0.0


def nan(gradients: dict[str, Tensor], rng: np.random.Generator) -> None:
    gradients["blocks.1.gate"].view(-1)[0] = float("nan")


FIRST, LAST, LONG = 240, 280, 500  # where the second segment begins and ends, and where it ends in a healthy run
AT = FIRST + 15  # the step at which a fault of what computes acts
ROTTEN = scaled(3000.0)
WRITTEN = ("state lost on resume", "hardware")
FAULTS = (
    # -- data
    Fault("repeated n-grams", (("bad data",),), with_bad(lambda rng: np.full(60, 7), 12)),
    Fault("base64 blob", (("bad data",),), with_bad(lambda rng: rng.integers(3, VOCABULARY, 300), 20)),
    Fault(
        "doubled escapes: too easy",
        (("bad data",), ("bad data", "contamination or repeated data")),
        escapes,
        with_escapes,
        replay=0.35,
    ),
    Fault(
        "learnt by heart, under other names",
        (("contamination or repeated data",),),
        lambda rng: good(rng, 200, "new", noise=30) + secrets("bad", 24, "code"),
        with_secrets,
        weights={"code": 1.0},
        phases=((140, {"code": 0.5, "other": 0.5}), (205, {"code": 1.0})),
    ),
    Fault(
        "a document that only this state cannot take",
        (("data × state",),),
        with_bad(lambda rng: np.full(12, 7), 12),
        injects=lambda d: d.updates > 200 and any(key.startswith("bad-") for key in d.documents),
        act=scaled(30000.0),
    ),
    Fault(
        "shuffling off",
        (("data order or packing",),),
        lambda rng: good(rng, 60, "easy") + good(rng, 60, "hard-new", noise=60) + good(rng, 1500, "more"),
        two_levels,
        shuffled=False,
        replay=0.2,
    ),
    Fault(
        "long documents that fill batches",
        (("data order or packing",),),
        lambda rng: good(rng, 60, "easy") + [document("long", walk(rng, 1200, noise=60))] + good(rng, 1500, "more"),
        two_levels,
        shuffled=False,
        replay=0.2,
    ),
    Fault(
        "mislabelled domain",
        (("mixture shift or wrong label",),),
        lambda rng: docs(rng, 600, "new", "code"),
        two_domains,
        replay=0.2,
    ),
    Fault(
        "mixture shift",
        (("mixture shift or wrong label",),),
        None,
        two_domains,
        weights={"code": 0.95, "docs": 0.05},
        phases=((AT, {"code": 0.1, "docs": 0.9}),),
    ),
    Fault("chat mask dropped", (("loss mask",),), lambda rng: chats(rng, 600, "new", "dropped"), chat_and_code),
    Fault("chat mask on the questions", (("loss mask",),), lambda rng: chats(rng, 600, "new", "other"), chat_and_code),
    Fault(
        "a NaN row",
        (("bad data",),),
        with_bad(lambda rng: walk(rng, 30), 12),
        injects=lambda d: any(key.startswith("bad-") for key in d.documents),
        act=nan,
    ),
    Fault(
        "fully masked row: NaN of its mean",
        (("bad data",), ("loss mask",)),
        lambda rng: chats(rng, 600, "new") + chats(rng, 12, "bad", "last"),
        chat_and_code,
        injects=lambda d: any(key.startswith("bad-") for key in d.documents),
        act=nan,
    ),
    Fault(
        "good documents of a form that is new: a third of their shard",
        (("new generation",), ("new generation", "bad data"), ("data × state",)),
        lambda rng: good(rng, 400, "new") + good(rng, 200, "form", step=11),
        replay=0.5,
    ),
    Fault(
        "a shard that is mostly bad",
        (("new generation", "bad data"), ("bad data",)),
        lambda rng: good(rng, 100, "new") + [document(f"bad-{i}", rng.integers(3, VOCABULARY, 60)) for i in range(400)],
    ),
    # -- recipe and state
    Fault("rate × 10", (("rate",),), later={"optimizer.lr": 0.1}),
    Fault("rate × 300", (("rate",),), later={"optimizer.lr": 3.0}),
    Fault("rate × 30, clipping lost", (("rate",),), later={"optimizer.lr": 0.3, "stability.grad_clip": 1e6}),
    Fault(
        "no warm-up: cut short at 240 of 4000 steps",
        (("rate",),),
        recipe={"optimizer.lr": 0.2, "schedule.warmup_steps": 4000, "schedule.trunk_steps.first": 4000},
        later={"schedule.warmup_steps": 0},
    ),
    Fault(
        "β2 too high: 0.9999 for 240 steps, then 0.95",
        (("rate",),),
        recipe={"optimizer.beta2": 0.9999},
        later={"optimizer.beta2": 0.95},
    ),
    Fault(
        "moments lost on resume",
        (("state lost on resume",),),
        recipe={"optimizer.beta1": 0.0, "optimizer.beta2": 0.999},
        checkpoint=zero(("exp_avg.", "exp_avg_sq.")),
    ),
    Fault("flipped bit in a weight", (WRITTEN, ("hardware",)), checkpoint=one_weight),
    Fault("flipped bit in a moment", (WRITTEN, ("hardware",)), checkpoint=one_moment),
    # -- what computes
    Fault("flipped bit in a gradient", (("hardware",),), injects=lambda d: d.live and d.step == AT, act=one_element),
    Fault("one NaN of a device", (("hardware",),), injects=lambda d: d.live and d.step == AT, act=nan),
    Fault("a device that is always wrong", (("hardware",),), injects=lambda d: d.step >= AT, act=noise),
    Fault(
        "wrong backward of a kernel",
        (("faulty kernel",),),
        injects=lambda d: d.step >= AT and not d.reference,
        act=ROTTEN,
    ),
    Fault(
        "NaN of a kernel in one batch",
        (("faulty kernel",),),
        injects=lambda d: d.step == AT and not d.reference,
        act=nan,
    ),
    Fault("wrong code in a commit", (("code change",),), injects=lambda d: d.step >= AT and d.faulty_code, act=ROTTEN),
    Fault("NaN since a commit", (("code change",),), injects=lambda d: d.step >= AT and d.faulty_code, act=nan),
    Fault(
        "overflow in bf16",
        (("numeric precision",),),
        None,
        None,
        {"precision": "bf16"},
        injects=lambda d: d.step >= AT and d.precision == "bf16",
        act=ROTTEN,
    ),
    Fault(
        "NaN in bf16",
        (("numeric precision",),),
        None,
        None,
        {"precision": "bf16"},
        injects=lambda d: d.step >= AT and d.precision == "bf16",
        act=nan,
    ),
    Fault(
        "underflow of second moments, as in fp16",
        (("numeric precision",),),
        None,
        None,
        {"precision": "bf16"},
        injects=lambda d: d.step >= AT and d.precision == "bf16",
        act=underflow,
    ),
    Fault(
        "a changed dependency, the one before at hand",
        (("code change",),),
        injects=lambda d: d.step >= FIRST and d.changed_environment,
        act=ROTTEN,
        dependency="at hand",
    ),
    Fault(
        "a changed dependency, the one before gone",
        (("code change", "unknown"),),
        injects=lambda d: d.step >= FIRST and d.changed_environment,
        act=ROTTEN,
        dependency="gone",
    ),
    Fault(
        "wrong denominator under accumulation",
        (("layout",),),
        None,
        None,
        {"batch.micro_sequences": 4},
        injects=lambda d: d.step >= AT and d.accumulates,
        act=ROTTEN,
    ),
    # -- healthy
    Fault("healthy: nothing happens", (), last=LONG),
    Fault("healthy: a new generation", (), lambda rng: good(rng, 600, "new", step=11), last=LONG),
    Fault("healthy: the same kind of documents join", (), lambda rng: good(rng, 600, "new"), last=LONG),
    Fault(
        "healthy: hard but good documents",
        (),
        lambda rng: good(rng, 600, "new") + good(rng, 60, "hard", noise=9),
        last=LONG,
    ),
    Fault("healthy: decay", (), kind="anneal", last=LONG),
    Fault("healthy: the batch grows", (), recipe={"batch.warmup": [{"until_step": 300, "sequences": 4}]}, last=LONG),
    Fault("healthy: micro-batches from the second segment on", (), later={"batch.micro_sequences": 2}, last=LONG),
    Fault("healthy: bf16", (), recipe={"precision": "bf16"}, last=LONG),
    Fault("healthy: Muon", (), recipe={"optimizer.name": "muon"}, last=LONG),
    Fault(
        "healthy: two domains and chat",
        (),
        lambda rng: chats(rng, 300, "new"),
        lambda rng: two_domains(rng) + chats(rng, 500, "chat"),
        last=LONG,
    ),
)
PREFLIGHT = "the preflight refuses it: pytest tests/factory/training/test_preflight.py"
ELSEWHERE = (  # what never shows in the loss of a small run on one rank, and what finds it
    ("equal seeds on tensor ranks", PREFLIGHT),
    ("replicas that drift apart", PREFLIGHT),
    ("one rank that does not clip", PREFLIGHT),
    ("each micro-batch's own mean for the batch's", PREFLIGHT),
    ("a key gradient that is 1 % too small", PREFLIGHT),
    ("data repeated after resume", PREFLIGHT),
    ("held-out text in training", "ingest leaves it out: pytest tests/factory/ingest/test_document_rules.py"),
)
