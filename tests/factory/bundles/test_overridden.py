"""The bundle of a release that was held and that a person released: what it says, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from factory.bundles.files import layout
from factory.bundles.files.folder import BundleFolder
from factory.bundles.verifying import ask, verify
from factory.bundles.writing import BundleOptions, write_bundle
from factory.gates.release.gate import decide
from factory.gates.release.recorded import evidence_sha256
from factory.ledger.plant import Plant
from factory.ledger.rows import VerdictRow
from tests.support.factory.exports import save_export, tiny_model
from tests.support.factory.shown import override
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
    verdict = VerdictRow.get(plant.ledger, decide(Plant(plant.workspace, plant.ledger), candidate))
    assert verdict.outcome == "hold" and "Not shown to be better" in " ".join(verdict.reasons)
    number = override(Plant(plant.workspace, plant.ledger), candidate, "ada", WHY)
    return write_bundle(Plant(plant.workspace, plant.ledger), number, BundleOptions()).folder


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(made, tmp_path / "bundle"))


def test_it_says_who_released_it_and_why(made: Path) -> None:
    found = verify(made)
    assert found.ok, [check for check in found.checks if not check.ok]
    said = {check.name: check.detail for check in found.checks}["verdict"]
    assert said == f"judged again, it is held, with an override by ada ({WHY}), in the same words"
    told = json.loads((made / layout.VERDICT).read_text())
    assert told["outcome"] == "hold" and (told["override"]["by"], told["override"]["why"]) == ("ada", WHY)
    card = (made / layout.CARD).read_text()
    assert "The release gate said **hold**; ada released it all the same: the demo &lt;b>is" in card
    assert "though the release gate held it: the demo" in card


Change = Callable[[dict[str, Any]], object]
# What is done to a bundle → what is said of it.
SPOILT: dict[str, tuple[str, Change, str]] = {
    "no override": (layout.VERDICT, lambda v: v.pop("override"), "the verdict is hold: nothing was to be released"),
    "nobody": (layout.VERDICT, lambda v: v["override"].update(by=" "), "the override names nobody, or no reason"),
    "no reason": (layout.VERDICT, lambda v: v["override"].update(why=""), "the override names nobody, or no reason"),
    "another model": (layout.VERDICT, lambda v: v["override"].update(sha256="0"), "of another model, or of other evidence"),
    "other evidence": (layout.EVIDENCE, lambda e: e.update(disputed=0.5), "of another model, or of other evidence"),
    "another form": (layout.VERDICT, lambda v: v.update(override=[1]), "override: expected by, evidence_sha256, sha256, why"),
    "a number": (layout.VERDICT, lambda v: v["override"].update(by=1), "override: expected by"),
    "said to be promoted": (layout.VERDICT, lambda v: v.update(outcome="promote"), "expected 'hold'"),
    "an unmade check": (layout.EVIDENCE, lambda e: e["checks"].update(smoke=[None, "no time"]), "judged again"),
    "a failed check": (layout.EVIDENCE, lambda e: e["checks"].update(smoke=[False, "no"]), "judged again, it is reject"),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILT)
def test_what_is_no_override(bundle: Path, what: str) -> None:
    path, change, words = SPOILT[what]
    value = json.loads((bundle / path).read_text())
    change(value)
    if path == layout.EVIDENCE:
        value["sha256"] = evidence_sha256(value)
    (bundle / path).write_text(json.dumps(value))
    found = ask("verdict", BundleFolder.open(bundle))
    assert found.ok is False and words in found.detail, found.detail


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: e["checks"].update(smoke=[None, "no time"]), "Check smoke could not be made: no time."),
        (lambda e: e.update(releasable=0.5), "licence does not allow"),
        (lambda e: e.update(anomalies=["loss_spike"]), "The training had an anomaly: loss_spike."),
    ],
)
def test_a_forged_override_of_what_no_person_overrides_is_found(bundle: Path, change: Change, words: str) -> None:
    """Signed and hashed anew, in the words of the judge: it is asked again whether the override was allowed."""
    stored = json.loads((bundle / layout.EVIDENCE).read_text())
    change(stored)
    stored["sha256"] = evidence_sha256(stored)
    (bundle / layout.EVIDENCE).write_text(json.dumps(stored))
    told = json.loads((bundle / layout.VERDICT).read_text())
    told["override"]["evidence_sha256"] = stored["sha256"]
    del told["judge"]
    (bundle / layout.VERDICT).write_text(json.dumps(told))
    found = ask("verdict", BundleFolder.open(bundle))
    assert found.ok is False and f"it is held for what no person overrides: {words}"[:40] in found.detail, found.detail
    assert words in found.detail
