"""Comparing two curves: their first divergence, the grid, missing values, and errors of bad files with the line."""

from __future__ import annotations

import json
import math
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factory.comparing.curve_comparison import Curve, compare_curves
from factory.comparing.curve_files import read_curve_file
from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from tests.support.factory.command import command_here
from tests.support.messages import refused, the
from tests.support.plants.release_scene import add_segment, write_metrics


def noisy(seed: int, count: int = 400, noise: float = 0.02) -> list[tuple[float, float]]:
    draw = random.Random(seed)
    return [(float(step), 8 / (1 + step / 20) + draw.gauss(0, noise)) for step in range(count)]


def first_at(ours: Curve, theirs: Curve, **keywords: float) -> float | None:
    found = compare_curves("loss", ours, theirs, **keywords).first
    return found and found.x


def test_noise_of_another_seed_is_no_divergence() -> None:
    assert [seed for seed in range(100) if first_at(noisy(seed), noisy(1000 + seed)) is not None] == []


@pytest.mark.parametrize("by", ["step", "drift", "offset", "spike"])
def test_the_first_divergence_is_found(by: str) -> None:
    for seed in range(20):
        change = {
            "step": lambda x: 0.4 * (x >= 200),
            "drift": lambda x: max(0.0, x - 200) * 0.01,
            "offset": lambda x: 0.6,
            "spike": lambda x: 0.5 * (x == 200),
        }[by]
        at = first_at(noisy(seed), [(x, y + change(x)) for x, y in noisy(1000 + seed)])
        low, high = {"step": (200, 200), "drift": (205, 230), "offset": (0, 0), "spike": (200, 200)}[by]
        assert at is not None and low <= at <= high


def test_a_tiny_difference_of_an_exact_copy_is_found_unless_it_is_rounding() -> None:
    ours = noisy(1)
    theirs = [(x, y + (1e-4 if x >= 137 else 0.0)) for x, y in ours]
    assert first_at(ours, theirs) == 137 and first_at(ours, theirs, floor=0.5e-4) is None
    assert first_at(ours, theirs, tolerance=2e-4) is None and first_at(ours, theirs, tolerance=0.5e-4) == 137


def test_a_value_that_is_not_finite_on_one_side_is_a_divergence() -> None:
    ours = noisy(1)
    theirs = [(x, math.nan if x in (50, 60) else y) for x, y in ours]
    found = compare_curves("loss", ours, theirs)
    assert found.first and found.first.x == 50 and found.not_finite == {"ours": [], "theirs": [50, 60]}
    both = compare_curves("loss", theirs, theirs)
    assert both.first is None and len(both.grid) == 400


def test_curves_are_compared_at_the_points_of_the_coarser_curve() -> None:
    ours = [(float(x), 2.0 * x) for x in range(100)]
    theirs = [(x + 0.5, 2.0 * x + 1.0) for x in range(0, 120, 10)]
    found = compare_curves("loss", ours, theirs)
    assert found.coarser == "theirs" and [x for x, *_ in found.grid] == [x + 0.5 for x in range(0, 90 + 1, 10)]
    assert found.first is None and found.largest == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(allow_nan=True)), min_size=1), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_a_curve_never_diverges_from_itself(points: list[tuple[int, float]], shift: int) -> None:
    curve = sorted({float(x + shift): y for x, y in points}.items())
    found = compare_curves("loss", curve, curve)
    assert found.first is None and len(found.grid) == len(curve)


EXPORTED = {
    "W&B": '"Step","run-7 - train/loss","run-7 - train/loss__MIN","run-7 - train/loss__MAX"\n1,2.5,2.4,2.6\n2,2.25,2.2,2.3\n',
    "TensorBoard": "Wall time,Step,Value\n1700000000.1,1,2.5\n1700000001.2,2,2.25\n",
    "another case": "STEP,Loss\n1,2.5\n2,2.25\n",
    "trainer_state.json": json.dumps(
        {
            "best_metric": None,
            "log_history": [
                {"epoch": 0.1, "grad_norm": 1.0, "learning_rate": 1e-3, "loss": 2.5, "step": 1},
                {"epoch": 0.2, "eval_loss": 9.0, "eval_runtime": 1.0, "step": 1},
                {"epoch": 0.2, "loss": 2.25, "step": 2},
                {"epoch": 0.2, "train_loss": 2.4, "train_runtime": 9.0, "step": 2},
            ],
        },
        indent=2,
    ),
    "one line": json.dumps({"log_history": [{"loss": 2.5, "step": 1}, {"loss": 2.25, "step": 2}]}),
    "JSON array": json.dumps([{"loss": 2.5, "step": 1}, {"loss": 2.25, "step": 2}]),
    "JSON lines of paths": '{"train/loss": 2.5, "eval/loss": 9, "_step": 1}\n{"train/loss": 2.25, "_step": 2}\n',
}


@pytest.mark.parametrize("tool", EXPORTED)
def test_curves_are_read_as_tools_export_them(tool: str, tmp_path: Path) -> None:
    path = tmp_path / "curve"
    path.write_text(EXPORTED[tool])
    assert read_curve_file(path, "steps", ["loss"]).points == {"loss": [(1.0, 2.5), (2.0, 2.25)]}


def test_a_step_column_with_an_unknown_name_must_be_named(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_text("Update,loss\n1,2.5\n")
    assert read_curve_file(path, "steps", ["loss"], "update").points == {"loss": [(1.0, 2.5)]}
    for named in (None, "updates"):
        with refused("curve_files.no_x_column", file=path, line=2, columns=["'Update'", "'loss'"]) as found:
            read_curve_file(path, "steps", ["loss"], named)
        assert ("'updates'" if named else "of steps") in found.value.data["wanted"]
        assert found.value.data["hint"].code == "curve_files.name_column"


def test_two_runs_in_one_export_are_ambiguous(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_text('"Step","a - train/loss","b - train/loss"\n1,2.5,3.5\n')
    with refused("curve_files.several_columns", metric="loss", columns="'a - train/loss', 'b - train/loss'"):
        read_curve_file(path, "steps", ["loss"])
    assert read_curve_file(path, "steps", ["b - train/loss"]).points == {"b - train/loss": [(1.0, 3.5)]}


@pytest.mark.parametrize(
    ("content", "code", "data"),
    [
        ("step,loss\n1,2.5\n2,abc\n", "curve_files.not_a_number", {"line": 3, "column": "loss", "value": "abc"}),
        ("step,loss\n1,2.5\nx,2.4\n", "curve_files.not_a_number", {"line": 3, "column": "step", "value": "x"}),
        ("step,loss\n1,2.5,7\n", "curve_files.other_width", {"line": 2, "values": 3, "columns": 2}),
        ("step,loss,loss\n1,2.5,7\n", "curve_files.column_twice", {"column": "loss"}),
        ("time,loss\n1,2.5\n", "curve_files.no_x_column", {"line": 2, "columns": ["'time'", "'loss'"]}),
        ("tokens,loss\n1,2.5\n", "curve_files.no_x_column", {"line": 2, "columns": ["'tokens'", "'loss'"]}),
        ("step,lose\n1,2.5\n", "curve_files.no_column", {"column": "loss", "nearest": "; did you mean 'lose'?"}),
        ('{"step": 1, "loss": 2}\n{"step": 2, "lo', "curve_files.line_not_json", {"line": 2}),
        ('{"step": 1, "loss": 2}\n[1]\n', "curve_files.line_not_object", {"line": 2, "type": "list"}),
        ('{"step": 1, "loss": [2]}\n', "curve_files.not_a_number", {"line": 1, "column": "loss", "value": "[2]"}),
        ('{"step": null, "loss": 2}\n', "curve_files.not_a_number", {"line": 1, "column": "step", "value": "None"}),
        ("[1]", "curve_files.no_list", {}),
        ("[", "curve_files.not_json", {}),
        ("", "curve_files.no_rows", {}),
        ("step,loss\n", "curve_files.no_rows", {}),
        (b"\xff\xfe\x00", "curve_files.file_not_utf8", {"byte": 0}),
        ('step,loss\n1,"2\n', "curve_files.bad_csv", {"line": 2}),
    ],
)
def test_an_error_in_a_file_has_the_line(tmp_path: Path, content: str | bytes, code: str, data: dict[str, Any]) -> None:
    path = tmp_path / "reference.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused(code, InputError, file=path, **data):
        read_curve_file(path, "steps", ["loss"])


def test_a_file_with_tokens_alone_is_compared_by_tokens(tmp_path: Path) -> None:
    path = tmp_path / "reference.csv"
    path.write_text("tokens,loss\n1,2.5\n")
    with refused("curve_files.no_x_column") as found:
        read_curve_file(path, "steps", ["loss"])
    hint = found.value.data["hint"]
    assert (hint.code, hint.data) == ("curve_files.other_unit", {"column": "tokens", "unit": "tokens"})


@given(st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_no_file_causes_a_traceback(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes(b"step,loss\n" * (len(content) % 2) + content)
    with suppress(InputError):
        read_curve_file(path, "steps", ["loss"])


def test_a_spreadsheet_of_a_resumed_run_keeps_the_last_value_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "reference.csv"
    path.write_bytes("\ufeffglobal_step;train/loss;note\n1;3.0;a\n2;2.5;\n3;2.0;\n2;2.25;again\n3;;\n".encode())
    found = read_curve_file(path, "steps", ["train/loss"])
    assert found.points["train/loss"] == [(1, 3.0), (2, 2.25), (3, 2.0)]
    note = the(found.notes, "curve_files.goes_back")
    assert (note.data["x"], note.data["times"]) == ("steps", 1)


@pytest.fixture
def trained(workspace: Workspace, ledger: Ledger) -> Workspace:
    row = add_segment(workspace, ledger, "trunk")
    write_metrics(Path(row.folder) / "metrics.jsonl", 0, 100)
    lines = [
        json.loads(line) | {"supervised_tokens": 0}
        for line in (Path(row.folder) / "metrics.jsonl").read_text().splitlines()
    ]
    (Path(row.folder) / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return workspace


def test_factory_compare_prints_the_first_divergence_and_writes_a_page(trained: Workspace, tmp_path: Path) -> None:
    path = tmp_path / "<b>published.csv"
    rows = [f"{step},{step * 512},{8 / (1 + step / 20) + (0.3 if step >= 40 else 0):.4f}" for step in range(0, 120, 1)]
    path.write_text("step,tokens,train/loss\n" + "\n".join(rows) + "\n")
    done = command_here("compare", str(path), "--metric", "loss=train/loss", home=trained)
    assert done.exit_code == 1
    assert "at step 40, in loss: ours 2.66667," in done.stdout and "theirs 2.9667, difference −0.3," in done.stdout
    page = (trained.reports / "comparison.html").read_text()
    assert "they diverge" in page and "&lt;b&gt;published" in page and "<b>published" not in page
    by_tokens = command_here(
        "compare", str(path), "--metric", "loss=train/loss", "--x", "tokens", "--json", home=trained
    )
    found = json.loads(by_tokens.stdout)
    first = the(found["says"], "comparing.first_divergence")["data"]
    assert (first["x"], first["unit"], first["metric"]) == (40 * 512, "token", "loss")
    assert found["first"]["x"] == 40 * 512 and found["metrics"][0]["coarser"] == "both"
    wide = command_here("compare", str(path), "--metric", "loss=train/loss", "--tolerance", "0.5", home=trained)
    assert wide.exit_code == 0 and "no divergence in loss" in wide.stdout
    itself = command_here("compare", "1", "--metric", "loss", "--metric", "loss/code", home=trained)
    assert itself.exit_code == 0 and "no divergence in loss, loss/code" in itself.stdout
    half = "step,tokens,loss\n" + "\n".join(f"{step},{step * 256},2.0" for step in range(9))
    path.write_text(half)
    warned = the(
        json.loads(command_here("compare", str(path), "--json", home=trained).stdout)["says"], "comparing.other_tokens"
    )
    assert warned["data"] == {"step": 8, "ours": 4096, "theirs": 2048}


@pytest.mark.parametrize(
    ("words", "code", "data"),
    [
        (["nowhere.csv"], "curve_files.unreadable", {"reason": "No such file or directory"}),
        (["1", "--run", "abc"], "compare.no_run", {"run": "abc"}),
        (["1", "--run", "abc", "--segment", "1"], "compare.two_runs", {}),
        (["1", "--metric", "lose"], "curve_files.no_column", {"column": "lose", "nearest": "; did you mean 'loss'?"}),
    ],
)
def test_a_mistake_in_the_arguments_of_compare_is_an_error(
    trained: Workspace, words: list[str], code: str, data: dict[str, Any]
) -> None:
    done = command_here("compare", *words, home=trained)
    assert isinstance(done.exception, InputError)
    with refused(code, **data):
        raise done.exception


@pytest.mark.parametrize("words", [["7"], ["1", "--segment", "9"]])
def test_a_missing_segment_is_an_error(trained: Workspace, words: list[str]) -> None:
    done = command_here("compare", *words, home=trained)
    assert isinstance(done.exception, InputError) and words[-1] in str(done.exception)


def test_runs_without_common_steps_are_not_compared(trained: Workspace, tmp_path: Path) -> None:
    path = tmp_path / "late.csv"
    path.write_text("step,loss\n500,1.0\n501,1.0\n")
    done = command_here("compare", str(path), home=trained)
    assert isinstance(done.exception, InputError)
    with refused("compare.no_overlap", unit="steps", first=0.0, last=99.0, other_first=500.0):
        raise done.exception
