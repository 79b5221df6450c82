"""``python -m benchmarks.peers``: the sides train the same thing, and the comparison says what was measured. Its speed is nobody's test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers import page
from benchmarks.peers.preparing import prepare
from benchmarks.peers.side import OURS, SFT, STAGES, TRAINER, Measured, Side
from benchmarks.peers.work import NO_TARGET, Work
from tests.support.paths import ROOT

KERNELS = str(ROOT / "policies" / "kernels.yaml")
TINY = ["--shape", "tiny", "--context", "256", "--tokens", "1024", "--steps", "3", "--rounds", "1", "--no-compile"]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A whole run on a tiny model in fp32, without TRL, which is no dependency."""
    out = tmp_path_factory.mktemp("peers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "has_trl", lambda: False)
        assert command.main([*TINY, "--precision", "fp32", "--plain", "--kernels", KERNELS, "--out", str(out)]) == 0
    (path,) = out.glob("peers-*.json")
    assert path.with_suffix(".md").read_text() == page.markdown(json.loads(path.read_text()))
    return dict(json.loads(path.read_text()))


@pytest.fixture(scope="module")
def sides(document: dict[str, Any]) -> dict[tuple[str, bool], Measured]:
    """By name, and whether documents are hidden from one another."""
    (found,) = document["found"]
    return {
        (side["side"]["name"], side["side"]["hidden"]): Measured(**one)
        for side in found["sides"]
        for one in side["rounds"]
    }


def test_the_sides_make_the_same_updates_from_the_same_weights(sides: dict[tuple[str, bool], Measured]) -> None:
    ours, theirs = sides[OURS, True].losses, sides[TRAINER, True].losses
    assert ours == pytest.approx(theirs, abs=1e-3)
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
    assert ours[-1] < ours[0] - 0.01, "and they learn"


def test_documents_that_see_one_another_are_another_function(sides: dict[tuple[str, bool], Measured]) -> None:
    gaps = [abs(a - b) for a, b in zip(sides[TRAINER, False].losses, sides[OURS, True].losses, strict=True)]
    assert max(gaps) > 1e-5


def test_a_side_has_a_time_for_each_step_and_a_peak_for_each_stage(sides: dict[tuple[str, bool], Measured]) -> None:
    for measured in sides.values():
        assert len(measured.losses) == len(measured.seconds) == len(measured.core_seconds) == 3
        assert min(measured.seconds + measured.core_seconds) > 0
        assert set(STAGES) <= set(measured.peaks)
        assert all(measured.peaks[stage] >= measured.afterwards[stage] > 50 << 20 for stage in STAGES)


def test_the_report_says_which_side_is_missing_and_how_to_get_it(document: dict[str, Any]) -> None:
    assert document["left_out"] == [SFT]
    assert "pip install trl" in page.markdown(document)
    assert str(ROOT) not in json.dumps(document)


def test_other_losses_than_ours_are_refused() -> None:
    ours, theirs = Measured(losses=[6.0, 5.0]), Measured(losses=[6.0005, 5.01])
    command.refuse_other_function({Side(OURS): ours, Side(TRAINER): theirs})
    for losses in ([6.002, 5.0], [6.0, 5.03]):
        theirs.losses = losses
        with pytest.raises(command.Failed):
            command.refuse_other_function({Side(OURS): ours, Side(TRAINER): theirs})
        command.refuse_other_function({Side(OURS): ours, Side(TRAINER, hidden=False): theirs})


def test_rows_hold_what_our_trainer_reads(tmp_path: Path) -> None:
    task = Work("tiny", 64, 4, 2, "fp32")
    prepare(tmp_path, task)
    rows = np.load(tmp_path / "rows.npz")
    assert {name: array.shape for name, array in rows.items()} == dict.fromkeys(rows, (8, 64))
    within = rows["position_ids"][:, 1:] > 0  # the next position is of the same document: its token is the target
    assert (rows["input_ids"][:, 1:] == rows["shift_labels"][:, :-1])[within].all()
    assert (rows["shift_labels"] != NO_TARGET).mean() > 0.9
    assert (rows["position_ids"] == 0).sum() > len(rows["position_ids"]), "some row has several documents"
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["model_type"], config["rope_parameters"]["rope_theta"]) == ("llama", 100_000.0)


def test_the_shape_is_the_public_models() -> None:
    assert Work("smollm2-135m", 512, 4, 2, "bf16").recipe().model.parameters == 134_515_008


def test_ratios_are_taken_beside_the_fastest_other() -> None:
    def side(name: str, seconds: float, peak: int) -> dict[str, Any]:
        one = Measured([1.0] * 3, [9.0, seconds, seconds], [9.0, 2 * seconds, 2 * seconds])
        one.peaks = dict.fromkeys(STAGES, peak) | {"saving": 2 * peak}
        return {"side": {"name": name}, "name": name, "rounds": [vars(one)]}

    found = {
        "work": {"rows": 2, "context": 50},
        "sides": [side(OURS, 1.0, 300), side(TRAINER, 2.0, 400), side(SFT, 1.5, 100)],
    }
    ratio = page.compare(found)
    assert ratio["fastest_other"] == SFT
    assert (ratio["wall"], ratio["processor"], ratio["processor_by_round"]) == (1.5, 1.5, [1.5])
    assert (ratio["memory_of_steps"], ratio["memory"]) == (3.0, 3.0)
    assert page.rates(found["sides"][0], 100) == {"wall": 100, "processor": 50}


def test_a_report_keeps_its_other_measurements_of_the_same_machine_and_versions(
    document: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "peers-here.json"
    assert command.read_kept(path, document) == []
    (found,) = document["found"]
    other = found | {"work": found["work"] | {"seed": 7}, "note": "Another seed."}
    again = found | {"note": "Once more."}
    for one in (found, other, again):
        command.write(path, document | {"found": command.read_kept(path, document)}, one)
    assert command.read_kept(path, document) == [other, again], "the same work replaces the first"
    assert len(json.loads(path.read_text())["ratios"]) == 2
    assert path.with_suffix(".md").read_text() == page.markdown(json.loads(path.read_text()))
    with pytest.raises(command.Refused, match="--add"):
        command.read_kept(path, document | {"versions": {"torch": "1.0"}})


def test_a_report_of_before_names_its_commit_once_for_all_measurements(
    document: dict[str, Any], tmp_path: Path
) -> None:
    (found,) = document["found"]
    path, new = tmp_path / "peers-here.json", ("commit", "load", "note")
    old = document | {"found": [{key: value for key, value in found.items() if key not in new}]}
    path.write_text(json.dumps(old | {key: found[key] for key in new}))
    assert command.read_kept(path, document) == [found]


@pytest.mark.parametrize(
    "words",
    [["--tokens", "1000"], ["--micro", "3"], ["--kernels", "/nowhere.yaml"], ["--shape", "huge"], ["--lr", "0"]],
)
def test_a_wrong_word_is_refused_before_anything_is_written(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*words, "--out", "/nowhere"]) == 2
    assert words[0] in capsys.readouterr().err


def test_a_side_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(command.Failed) as error:
        command.train_once(tmp_path, Side(TRAINER), Path(KERNELS))
    assert "work.json" in str(error.value)


def test_another_sides_process_holds_none_of_our_trainer() -> None:
    """It would count as that side's memory."""
    script = "import sys, benchmarks.peers.side; print(sorted({'torch', 'trainer', 'kernels', 'factory'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
