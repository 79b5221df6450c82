"""The bundle of a release that the gate held and a person released: what the bundle tells, and which overrides are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from factory.bundles.files import layout
from factory.bundles.files.folder import BundleFolder
from factory.bundles.verifying import run_check, verify_bundle
from factory.bundles.writing import BundleOptions, write_release_bundle
from factory.gates.release.gate import judge_candidate
from factory.gates.release.recorded_verdict import compute_evidence_sha256
from factory.ledger.plant import Plant
from factory.ledger.rows import VerdictRow
from tests.support.factory.exports import save_export, tiny_model
from tests.support.factory.shown import override
from tests.support.messages import codes, says, tree
from tests.support.plants.release_scene import with_store
from tests.support.plants.released_plant import evaluated, released_plant

WHY = "the demo <b>is</b> tomorrow"


pytestmark = pytest.mark.slow("a release by a person, and its bundle")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plant = released_plant(tmp_path_factory.mktemp("overridden"))
    with_store(plant.workspace)
    export = save_export(tiny_model(3), plant.workspace.exports / "candidate-3", plant.tokenizer)
    candidate = plant.add_candidate(export)
    evaluated(plant, candidate, 2.8)  # as the champion
    verdict = VerdictRow.get(plant.ledger, judge_candidate(Plant(plant.workspace, plant.ledger), candidate))
    assert verdict.outcome == "hold"
    number = override(Plant(plant.workspace, plant.ledger), candidate, "ada", WHY)
    return write_release_bundle(Plant(plant.workspace, plant.ledger), number, BundleOptions()).folder


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(made, tmp_path / "bundle"))


def test_a_bundle_names_who_overrode_the_hold_and_why(made: Path) -> None:
    found = verify_bundle(made)
    assert found.is_verified, [check for check in found.checks if not check.ok]
    said = {check.name: check.detail for check in found.checks}["verdict"]
    assert codes(tree(said)) == ["verdict_comparison.same", "verdict_comparison.overridden"]
    assert says(said, ("verdict_comparison.overridden", {"by": "ada", "why": WHY}))
    told = json.loads((made / layout.VERDICT).read_text())
    assert told["outcome"] == "hold" and (told["override"]["by"], told["override"]["why"]) == ("ada", WHY)
    card = (made / layout.CARD).read_text()
    assert "said **hold**; ada released it" in card and "same: the demo &lt;b>is" in card
    assert "held it: the demo" in card


Change = Callable[[dict[str, Any]], object]
# A change of a bundle → the file, the change, the message of the verdict's check.
SPOILT: dict[str, tuple[str, Change, str, dict[str, Any]]] = {
    "no override": (layout.VERDICT, lambda v: v.pop("override"), "not_released", {"outcome": "hold"}),
    "nobody": (layout.VERDICT, lambda v: v["override"].update(by=" "), "empty_override", {}),
    "no reason": (layout.VERDICT, lambda v: v["override"].update(why=""), "empty_override", {}),
    "another model": (layout.VERDICT, lambda v: v["override"].update(sha256="0"), "override_of_other", {}),
    "other evidence": (layout.EVIDENCE, lambda e: e.update(disputed=0.5), "override_of_other", {}),
    "another form": (layout.VERDICT, lambda v: v.update(override=[1]), "odd_override", {}),
    "a number": (layout.VERDICT, lambda v: v["override"].update(by=1), "odd_override", {}),
    "said to be promoted": (layout.VERDICT, lambda v: v.update(outcome="promote"), "other_verdict", {"outcome": "hold"}),
    "an unmade check": (layout.EVIDENCE, lambda e: e["checks"].update(smoke=[None, "no time"]), "other_verdict", {"outcome": "hold"}),
    "a failed check": (layout.EVIDENCE, lambda e: e["checks"].update(smoke=[False, "no"]), "other_verdict", {"outcome": "reject"}),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILT)
def test_an_invalid_override_fails_the_check_of_the_verdict(bundle: Path, what: str) -> None:
    path, change, code, data = SPOILT[what]
    value = json.loads((bundle / path).read_text())
    change(value)
    if path == layout.EVIDENCE:
        value["sha256"] = compute_evidence_sha256(value)
    (bundle / path).write_text(json.dumps(value))
    found = run_check("verdict", BundleFolder.open(bundle))
    assert found.ok is False and says(found.detail, (f"verdict_comparison.{code}", data)), found.detail


@pytest.mark.parametrize(
    ("change", "mark"),
    [
        (lambda e: e["checks"].update(smoke=[None, "no time"]), "no time"),
        (lambda e: e.update(releasable=0.5), "licence"),
        (lambda e: e.update(anomalies=["loss_spike"]), "loss_spike"),
    ],
)
def test_a_forged_override_of_a_reason_that_nobody_can_override_is_found(
    bundle: Path, change: Change, mark: str
) -> None:
    """The forger signed and hashed the bundle again, with the judge's own words."""
    stored = json.loads((bundle / layout.EVIDENCE).read_text())
    change(stored)
    stored["sha256"] = compute_evidence_sha256(stored)
    (bundle / layout.EVIDENCE).write_text(json.dumps(stored))
    told = json.loads((bundle / layout.VERDICT).read_text())
    told["override"]["evidence_sha256"] = stored["sha256"]
    del told["judge"]
    (bundle / layout.VERDICT).write_text(json.dumps(told))
    found = run_check("verdict", BundleFolder.open(bundle))
    assert found.ok is False and "verdict_comparison.not_overridable" in codes(tree(found.detail)), found.detail
    assert mark in found.detail
