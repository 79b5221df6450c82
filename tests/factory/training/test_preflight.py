"""The preflight finds five faults that the loss does not show, each in a real commit. The judge of its evidence is a pure function of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, segments
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, VerdictRow
from factory.ledger.status import format_status, read_status
from factory.training import preflight_runs
from factory.training.certificate import PreflightPolicy
from factory.training.certifying import NotCertifiedError, accept_code, ensure_certified, find_newest_code_verdict
from factory.training.planning import plan_trunk
from factory.training.preflight import (
    LEAD_STEPS,
    WAYS,
    PreflightEvidence,
    judge_preflight,
    make_small_recipe,
)
from factory.training.preflight_noise import DistanceFromStraightRun
from factory.training.training import run_segment
from kernels.contract.message import Message
from tests.support.factory.code_loop import make_target
from tests.support.factory.command import factory
from tests.support.messages import codes, refused, the
from tests.support.paths import ROOT
from tests.support.plants.trained_plant import commit_edit, git, make_plant
from trainer.contract.errors import RecipeError
from trainer.contract.recipe import Recipe

STEPS = 4
WORDS = {way.name: way.words for way in WAYS}
SLOW = pytest.mark.slow("torchrun and two ranks for each fault: fifteen seconds on a quiet machine")
NEAR = DistanceFromStraightRun(
    {"loss": [1e-7, 2e-7], "grad_norm": [1e-7, 1e-7]}, {"w": 1e-6, "v": 3e-6, "exp_avg.w": 1e-7}
)
LOST = replace(NEAR, series=NEAR.series | {"loss": [math.inf, math.inf]})  # no run has a finite loss
HONEST = PreflightEvidence(
    "c0ffee",
    LEAD_STEPS,
    2,
    True,
    rounding=[NEAR] * 4,
    apart={way.name: NEAR for way in WAYS} | {"resumed": DistanceFromStraightRun({"loss": [0.0, 0.0]}, {"w": 0.0})},
    born_apart={way.name: [] for way in WAYS if way.ranks > 1},
    replicas_apart={way.name: [] for way in WAYS if way.ranks > 1},
)


# -- the judge ---------------------------------------------------------------------------------------------------------
def beside(**changes: Any) -> PreflightEvidence:
    """The honest evidence with one way's part of a mapping changed: ``apart={"split": …}``."""
    return replace(HONEST, **{key: {**getattr(HONEST, key), **value} for key, value in changes.items()})


def test_a_difference_that_rounding_explains_passes() -> None:
    found = judge_preflight(PreflightPolicy(), HONEST)
    assert found.outcome == "promote" and the(found.reasons, "training.preflight.passed").data == {
        "ways": 7,
        "steps": 2,
    }


@pytest.mark.parametrize(
    ("evidence", "outcome", "code", "data"),
    [
        (
            beside(apart={"accumulated": DistanceFromStraightRun({"loss": [1e-7, 1e-4]}, {"w": 1.0})}),
            "reject",
            "beyond_rounding",
            {
                "both": WORDS["accumulated"],
                "what": "loss",
                "step": 11,
                "difference": 1e-4,
                "rounding": pytest.approx(2e-7),
                "allowed": pytest.approx(2e-6),
            },
        ),
        (
            beside(apart={"reference": DistanceFromStraightRun({"loss": [1e-7, 1e-7]}, {"w": 1e-6, "exp_avg.w": 0.1})}),
            "reject",
            "beyond_rounding",
            {"both": WORDS["reference"], "what": "exp_avg.w", "step": 11},
        ),
        (
            beside(apart={"resumed": DistanceFromStraightRun({"loss": [0.0, 0.0]}, {"w": 1e-9})}),
            "reject",
            "bits_differ",
            {"both": WORDS["resumed"], "what": "w", "step": 11},
        ),
        (
            beside(apart={"split": DistanceFromStraightRun({"loss": [1e-7, float("nan")]}, {})}),
            "reject",
            "beyond_rounding",
            {"both": WORDS["split"], "step": 11},
        ),
        (
            beside(born_apart={"tensor": ["blocks.0.up"]}),
            "reject",
            "initial_weights_differ",
            {"both": WORDS["tensor"], "count": 1, "weights": ["blocks.0.up"]},
        ),
        (
            beside(replicas_apart={"replicas": ["embedding"]}),
            "reject",
            "copies_differ",
            {"both": WORDS["replicas"], "step": 11, "weights": ["embedding"]},
        ),
        (beside(replicas_apart={"replicas": None}), "hold", "copies_unknown", {"both": WORDS["replicas"]}),
        (
            replace(HONEST, failed={"split": "exit 1: no"}),
            "reject",
            "run_failed",
            {"run": "split", "line": "exit 1: no"},
        ),
        (replace(HONEST, rounding=[NEAR] * 3), "hold", "no_rounding", {}),
        (replace(HONEST, rounding=[LOST] * 4), "hold", "no_rounding", {}),
        (
            replace(HONEST, apart={"resumed": HONEST.apart["resumed"]}),
            "hold",
            "not_compared",
            {"both": WORDS["accumulated"]},
        ),
    ],
)
def test_the_judge_rejects_a_fault_and_holds_if_a_measurement_is_missing(
    evidence: PreflightEvidence, outcome: str, code: str, data: dict[str, Any]
) -> None:
    found = judge_preflight(PreflightPolicy(), evidence)
    assert found.outcome == outcome and codes(found.reasons)[0] == f"training.preflight.{code}", found.reasons
    assert {name: found.reasons[0].data[name] for name in data} == data


def test_the_judge_ignores_a_part_that_is_turned_off_and_names_a_way_that_cannot_run() -> None:
    bad = beside(apart={"accumulated": DistanceFromStraightRun({"loss": [1.0, 1.0]}, {})})
    assert judge_preflight(PreflightPolicy(parts=["resume", "kernels"]), bad).outcome == "promote"
    apart = {name: found for name, found in HONEST.apart.items() if name != "compiled"}
    found = judge_preflight(PreflightPolicy(), replace(HONEST, apart=apart, left_out={"compiled": "it is not"}))
    assert found.outcome == "promote"
    assert the(found.reasons, "training.preflight.left_out").data == {"both": WORDS["compiled"], "why": "it is not"}


def test_one_step_with_a_small_effect_of_rounding_does_not_reject_an_honest_way() -> None:
    lucky = DistanceFromStraightRun({"loss": [2e-7, 0.0]}, {"w": 0.0, "v": 3e-6})
    rounding = [lucky] * 4
    honest = DistanceFromStraightRun({"loss": [2e-7, 1.5e-6]}, {"w": 2e-6, "v": 3e-6})
    evidence = replace(beside(apart={"accumulated": honest}), rounding=rounding)
    assert judge_preflight(PreflightPolicy(parts=["accumulation"]), evidence).outcome == "promote"


def test_ranks_may_round_the_gradient_norm_as_wrongly_as_its_sum_and_no_other_way_may() -> None:
    other_order = DistanceFromStraightRun(
        {"loss": [1e-7, 1e-7], "grad_norm": [2e-5, 1e-5]}, {"w": 2e-5, "exp_avg.w": 1e-5}
    )
    judge = lambda way, sum_error: judge_preflight(
        PreflightPolicy(), replace(beside(apart={way: other_order}), sum_error=sum_error)
    )
    assert judge("split", 8e-6).outcome == "promote"
    for way, sum_error in (("split", 6e-6), ("accumulated", 8e-6)):
        found = judge(way, sum_error)
        reason = the(found.reasons, "training.preflight.beyond_rounding").data
        assert found.outcome == "reject" and (reason["both"], reason["what"], reason["step"]) == (
            WORDS[way],
            "grad_norm",
            10,
        )
    assert reason["allowed"] == pytest.approx(1e-6)
    evidence = replace(beside(apart={"split": other_order}), longest_sum=131072)
    assert judge_preflight(PreflightPolicy(), evidence).outcome == "promote", "sqrt(n) · 2^-24 is 2.2e-5"


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "policies" / "recipes").glob("*.yaml")))
def test_the_small_recipe_of_every_shipped_recipe_has_the_same_switches(name: str) -> None:
    recipe = Recipe.load(ROOT / "policies" / "recipes" / f"{name}.yaml")
    small = Recipe.parse(make_small_recipe(recipe.model_dump(), 20))
    assert small.model.parameters <= recipe.model.parameters and not small.compile
    assert small.model.vocab_size == recipe.model.vocab_size and small.model.head_dim == recipe.model.head_dim
    same = lambda one: (one.precision, one.optimizer, bool(one.model.experts), one.model.qk_norm, one.batch.packing)
    assert same(small) == same(recipe)


def test_a_large_recipe_is_made_narrow_and_two_tensor_ranks_can_still_share_it() -> None:
    tiny = Recipe.load(ROOT / "policies" / "recipes" / "tiny.yaml").model_dump()
    experts = {"count": 128, "per_token": 8, "d_ff": 1536, "dense_layers": 3}
    large = {"d_model": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "head_dim": 128, "d_ff": 28672, "context": 8192}
    for more in ({}, {"experts": experts}, {"qk_norm": False}, {"qk_norm": False, "nope_every": 4}):
        recipe = Recipe.parse(tiny | {"model": tiny["model"] | large | more})
        small = Recipe.parse(make_small_recipe(recipe.model_dump(), 20))
        assert small.model.parameters < recipe.model.parameters / 100
        ranks = small.model_copy(update={"parallel": small.parallel.model_copy(update={"tensor": 2})})
        assert ranks.parallel.data_ranks(2, small.model) == 1
        assert any(small.model.is_expert_layer(layer) for layer in range(small.model.layers)) == ("experts" in more)


def test_a_small_recipe_trains_lora_of_a_smaller_rank_with_the_same_scale_and_freezes_what_it_has() -> None:
    tiny = Recipe.load(ROOT / "policies" / "recipes" / "tiny.yaml").model_dump()
    model = tiny["model"] | {"d_model": 2048, "layers": 24, "heads": 16, "kv_heads": 8, "head_dim": 128, "d_ff": 8192}
    adapt = {"kind": "dora", "rank": 500, "alpha": 1000.0, "targets": ["k", "down"]}
    recipe = Recipe.parse(tiny | {"model": model, "adapt": adapt})
    small = Recipe.parse(make_small_recipe(recipe.model_dump(), 20))
    assert small.adapt is not None and recipe.adapt is not None
    k = (small.model.kv_heads * small.model.head_dim, small.model.d_model)
    assert (small.adapt.kind, small.adapt.targets, small.adapt.scale) == ("dora", ["k", "down"], 2.0)
    assert small.adapt.rank < 500 and small.adapt.rank * sum(k) < k[0] * k[1] <= (small.adapt.rank + 1) * sum(k)
    with pytest.raises(RecipeError):
        Recipe.parse(small.model_dump() | {"adapt": small.adapt.model_dump() | {"rank": small.adapt.rank + 1}})

    frozen = Recipe.parse(tiny | {"model": model, "freeze": ["embedding", "blocks.1", "blocks.20-23"]})
    assert Recipe.parse(make_small_recipe(frozen.model_dump(), 20)).freeze == ["embedding", "blocks.1"]
    most = Recipe.parse(tiny | {"model": model, "freeze": ["embedding", "final_norm", "blocks.0-22"]})
    assert Recipe.parse(make_small_recipe(most.model_dump(), 20)).freeze == [], "something must be trained"


# -- real commits ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Hangar:
    """A plant with a trained trunk, and the code that it trains with."""

    workspace: Workspace
    ledger: Ledger
    code: Path
    base: str

    def edit(self, path: str, old: str, new: str) -> None:
        commit_edit(self.code, path, old, new)

    def plan(self) -> SegmentRow:
        return SegmentRow.get(self.ledger, plan_trunk(Plant(self.workspace, self.ledger), 4))

    def run_preflight(self, *parts: Any) -> tuple[str, Message]:
        """(outcome, first reason) of a preflight of the live commit."""
        policy = PreflightPolicy(parts=list(parts), steps=STEPS)
        evidence = preflight_runs.run_preflight(Plant(self.workspace, self.ledger), self.plan(), policy)
        found = judge_preflight(policy, evidence)
        return found.outcome, found.reasons[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Hangar:
    root = tmp_path_factory.mktemp("preflight")
    code = make_target(root / "code")
    workspace, ledger = make_plant(root, code)
    return Hangar(workspace, ledger, code, git(code, "rev-parse", "HEAD"))


@pytest.fixture
def hangar(made: Hangar) -> Iterator[Hangar]:
    """The plant with the code that trained its trunk. Afterwards no segment of the test is open."""
    yield made
    git(made.code, "reset", "--quiet", "--hard", made.base)
    with made.ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id > 1).values(state="abandoned"))


DENOMINATOR = (  # each micro-batch's mean, summed: what transformers #34191 did
    "trainer/batch.py",
    "        stretches = round_up_document_runs(most)\n",
    '        parts["weights_BT"] = tuple(part / part.sum() for part in parts["weights_BT"])\n'
    "        stretches = round_up_document_runs(most)\n",
)
BACKWARD = (
    "kernels/attention/__init__.py",
    "        return dq_BTHK, dk_BTGK, dv_BTGK, None",
    "        return dq_BTHK, dk_BTGK * 0.99, dv_BTGK, None",
)
REPEATED = (
    "trainer/run.py",
    'state=state.get("sampler") if state is not None and not restarts else None,\n        )\n',
    "state=None,\n        )\n        if state is not None:\n            self.order.step = state['step']\n",
)
FORGOTTEN = (
    "trainer/run.py",
    "self.optimizer.load_state_tensors(optimizer, untrained)",
    "self.optimizer.load_state_tensors({key: 0 * tensor for key, tensor in optimizer.items()})",
)
SEEDS = (
    "trainer/model/transformer.py",
    "Region.from_tensor(parameter).view_in_whole_tensor(self._drawn(name, parameter.shape, seed))",
    "self._drawn(name, get_local_part(parameter).shape, seed)",
)
CLIPPING = (
    "trainer/run.py",
    "        update = WeightUpdate(batch.step,",
    "        divide_by = divide_by if self.ranks.is_leader else torch.ones_like(divide_by)\n        update = WeightUpdate(batch.step,",
)
DRIFT = (
    "trainer/run.py",
    "        self.optimizer.step(lr, divide_by, skip)\n",
    "        self.optimizer.step(lr * (1 if self.ranks.is_leader else 1.001), divide_by, skip)\n",
)


@pytest.mark.long("two ranks, and five other ways to train the same")
def test_an_honest_commit_passes_all_parts(hangar: Hangar) -> None:
    text = (hangar.code / "policies" / "kernels.yaml").read_text()
    hangar.edit("policies/kernels.yaml", text, text.replace("swiglu: reference", "swiglu: native", 1))
    outcome, reason = hangar.run_preflight("resume", "accumulation", "kernels", "compile", "ranks")
    assert outcome == "promote" and (reason.code, reason.data["ways"]) == ("training.preflight.passed", 6), reason


@pytest.mark.long("two ranks, and five other ways to train the same")
def test_an_honest_commit_in_fp8_passes_all_parts(hangar: Hangar) -> None:
    """Scales are powers of two, so that micro-batches, joined matrices and ranks round elements alike."""
    recipe = hangar.workspace.own_recipe_path()
    before = recipe.read_text()
    try:
        recipe.write_text(before.replace("precision: fp32", "precision: fp8"))
        outcome, reason = hangar.run_preflight("resume", "accumulation", "kernels", "compile", "ranks")
    finally:
        recipe.write_text(before)
    assert outcome == "promote", reason


def test_a_denominator_that_depends_on_the_accumulation_is_found(hangar: Hangar) -> None:
    hangar.edit(*DENOMINATOR)
    outcome, reason = hangar.run_preflight("accumulation")
    assert outcome == "reject" and reason.code == "training.preflight.beyond_rounding", reason
    assert reason.data["both"] == WORDS["accumulated"]
    assert reason.data["step"] == LEAD_STEPS, "the first step with a different gradient"


def test_a_wrong_backward_of_a_kernel_is_found(hangar: Hangar) -> None:
    text = (hangar.code / "policies" / "kernels.yaml").read_text()
    hangar.edit("policies/kernels.yaml", text, text.replace("attention: reference", "attention: recompute", 1))
    hangar.edit(*BACKWARD)
    outcome, reason = hangar.run_preflight("kernels")
    assert outcome == "reject" and reason.code == "training.preflight.beyond_rounding", reason
    assert reason.data["both"] == WORDS["reference"]


@pytest.mark.sample("moments")
@SLOW
@pytest.mark.parametrize("fault", [REPEATED, FORGOTTEN], ids=["data that are read again", "moments"])
def test_state_that_is_lost_on_resume_is_found(hangar: Hangar, fault: tuple[str, str, str]) -> None:
    hangar.edit(*fault)
    outcome, reason = hangar.run_preflight("resume")
    assert outcome == "reject" and reason.code == "training.preflight.bits_differ", reason
    assert reason.data["both"] == WORDS["resumed"]


@pytest.mark.sample("clipping on one rank")
@pytest.mark.parametrize(
    ("fault", "code", "way"),
    [
        pytest.param(SEEDS, "initial_weights_differ", "tensor", id="equal seeds"),
        pytest.param(CLIPPING, "beyond_rounding", "split", id="clipping on one rank"),
        pytest.param(DRIFT, "copies_differ", "replicas", id="drifting replicas"),
    ],
)
@SLOW
def test_a_fault_that_only_shows_on_several_ranks_is_found(
    hangar: Hangar, fault: tuple[str, str, str], code: str, way: str
) -> None:
    hangar.edit(*fault)
    policy = PreflightPolicy(parts=["ranks"], steps=STEPS)
    evidence = preflight_runs.run_preflight(Plant(hangar.workspace, hangar.ledger), hangar.plan(), policy)
    found = judge_preflight(policy, evidence)
    reasons = [(reason.code, reason.data.get("both")) for reason in found.reasons]
    assert found.outcome == "reject" and (f"training.preflight.{code}", WORDS[way]) in reasons, found.reasons


def write_policy(hangar: Hangar, text: str) -> None:
    (hangar.workspace.root / "policies" / "gates" / "certificate.yaml").write_text(text)


def verdicts_of(ledger: Ledger, segment: int) -> Mapping[str, VerdictRow]:
    rows = VerdictRow.select(ledger, "WHERE subject = :subject ORDER BY id", subject=f"segment:{segment}")
    return {row.gate: row for row in rows}


@pytest.mark.slow("five runs of a certificate before those of the preflight")
def test_a_refused_commit_does_not_train_until_a_person_accepts_it(hangar: Hangar) -> None:
    """The tiny recipe has one micro-batch, so the certificate finds no difference between old and new code."""
    write_policy(hangar, f"steps: 4\npreflight: {{parts: [accumulation], steps: {STEPS}}}\n")
    hangar.edit(*DENOMINATOR)
    number = hangar.plan().id
    with refused("training.not_certified", NotCertifiedError, segment=number) as raised:
        run_segment(Plant(hangar.workspace, hangar.ledger), number)
    assert f"Preflight: {WORDS['accumulated']}" in str(raised.value) and f"At step {LEAD_STEPS}, " in str(raised.value)
    folder = Path(SegmentRow.get(hangar.ledger, number).folder)
    assert SegmentRow.get(hangar.ledger, number).state == "uncertified" and not (folder / "segment.json").exists()
    found = verdicts_of(hangar.ledger, number)
    assert {gate: row.outcome for gate, row in found.items()} == {"code": "promote", "preflight": "reject"}
    assert (folder / "preflight.json").exists() and not (folder / "preflight").exists()
    words = "\n".join(format_status(read_status(hangar.workspace)))
    assert f"Preflight: {WORDS['accumulated']}" in words and words.count("is not certified") == 1
    shown = factory("certify", "-w", str(hangar.workspace.root)).stdout
    assert "NOT CERTIFIED  (preflight of" in shown and f"Preflight: {WORDS['accumulated']}" in shown
    accept_code(Plant(hangar.workspace, hangar.ledger), number, "ada")
    run_segment(Plant(hangar.workspace, hangar.ledger), number)
    assert SegmentRow.get(hangar.ledger, number).state == "done"


def test_another_layout_or_environment_is_preflighted_once(hangar: Hangar, monkeypatch: pytest.MonkeyPatch) -> None:
    write_policy(hangar, f"preflight: {{parts: [resume], steps: {STEPS}}}\n")

    def changed(**keys: Any) -> SegmentRow:
        row = hangar.plan()
        assert row.computing is not None
        machine = row.computing["machine"] | keys.pop("machine", {})
        with hangar.ledger.begin() as tx:
            computing = row.computing | keys | {"machine": machine}
            tx.execute(sa.update(segments).where(segments.c.id == row.id).values(computing=computing))
        return SegmentRow.get(hangar.ledger, row.id)

    def certify(row: SegmentRow) -> VerdictRow | None:
        ensure_certified(Plant(hangar.workspace, hangar.ledger), row)
        return find_newest_code_verdict(hangar.ledger, row.id)

    assert certify(changed()) is None, "as the trunk was trained"
    first = certify(changed(ranks=2))
    assert first is not None and (first.gate, first.outcome) == ("preflight", "promote"), first
    facts = first.read_evidence(hangar.ledger)
    assert set(facts["apart"]) == {"resumed"} and facts["seconds"] > 0
    monkeypatch.setattr(preflight_runs, "run_preflight", lambda *_: pytest.fail("measured again"))
    again = certify(changed(ranks=2))
    assert again is not None and again.outcome == "promote" and again.id != first.id
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        certify(changed(machine={"torch": "9.9"}))
    write_policy(hangar, "preflight: {parts: []}\n")
    assert certify(changed(machine={"torch": "9.9"})) is None
