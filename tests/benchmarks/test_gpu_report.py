"""How ``benchmarks.gpu`` makes a report from its records: verdicts, headlines, names of files. No process is started."""

from __future__ import annotations

import doctest
import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import card_state, facts, fast, needs, page, pool, records, shapes, winners
from benchmarks.gpu.fast import floor
from benchmarks.gpu.parts import PARTS, Settings
from kernels.contract.registry import OPS


@pytest.mark.parametrize("module", [fast, page, pool, card_state, winners], ids=lambda module: module.__name__)
def test_the_examples_in_docstrings_hold(module: Any) -> None:
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


def row(by: str, side: str, low: float, median: float, high: float, comparable: bool = True) -> dict[str, Any]:
    times = {"low_s": low, "both_s": median, "high_s": high, "note": "" if comparable else "sees more"}
    return {"op": "swiglu", "width": 1024, "by": by, "side": side, "comparable": comparable, "wrong": ""} | times


@pytest.mark.parametrize(
    ("rows", "says", "keep"),
    [
        ([row("triton", "ours", 0.9, 1, 1.1), row("eager", "torch", 1.9, 2, 2.1)], "keep triton: 2.00", True),
        (
            [row("triton", "ours", 1.9, 2, 2.1), row("liger", "Liger", 0.9, 1, 1.1)],
            "liger (Liger) wins: triton, the best of ours, is 0.50",
            False,
        ),
        ([row("triton", "ours", 0.9, 1, 1.5), row("eager", "torch", 1.2, 1.3, 1.4)], "no clear winner: triton", False),
        ([row("triton", "ours", 1.2, 1.3, 1.4), row("eager", "torch", 0.9, 1, 1.5)], "within the spread", False),
        (
            [row("triton", "ours", 2, 2, 2), row("SDPA", "torch", 1, 1, 1, comparable=False)],
            "nothing else could be",
            True,
        ),
        (
            [row("triton", "ours", 2, 2, 2), row("SDPA", "torch", 1, 1, 1, False)],
            "SDPA (2.00 times as fast; sees more)",
            True,
        ),
        ([row("eager", "torch", 1, 1, 1)], "nothing right of ours was timed; fastest: eager", False),
    ],
)
def test_our_kernel_is_kept_if_it_is_faster_by_more_than_the_spread(
    rows: list[dict[str, Any]], says: str, keep: bool
) -> None:
    (verdict,) = winners.verdicts(rows)
    assert says in str(verdict) and verdict.keep is keep


def test_the_shortest_possible_time_is_the_larger_of_moving_and_computing() -> None:
    norm, attention = OPS["rms_norm"], OPS["attention"]
    shape = shapes.WIDTHS[0].shape(4)
    cost = norm.cost(shape, 2)
    assert floor(norm, shape, 1e12, 1e18) == ((cost.forward_bytes + cost.backward_bytes) / 1e12, "copy")
    assert floor(attention, shape, 1e18, 1e12) == (3.5 * attention.cost(shape, 2).forward_flops / 1e12, "product")
    assert floor(norm, shape, None, 1e12) is None


def test_shapes_shrink_to_fit_the_memory_and_are_refused_only_then() -> None:
    op = OPS["attention"]
    whole = shapes.shape_for(op, 0, 1e12)
    assert (whole.batch, whole.context, whole.d_model, whole.heads, whole.kv_heads) == (4, 4096, 4096, 32, 8)
    half = shapes.shape_for(op, 0, 0.6 * shapes.needs_bytes(op, whole))
    assert half.batch == 2
    with pytest.raises(shapes.TooLarge, match="too little memory"):
        shapes.shape_for(op, 0, 0.2 * shapes.needs_bytes(op, whole))
    assert shapes.shape_for(OPS["linear_cross_entropy"], 0, 1e12).tokens == 8192, "that of published marks"


def test_an_incomplete_line_of_the_records_is_left_out(tmp_path: Path) -> None:
    whole = records.Records(tmp_path)
    whole.add("run", command="x", began="", limit_s=60, label="")
    whole.named("card-abcdef0")
    whole.add("wrong", part="right", item="a/b", what="a/b", why="off")
    whole.add("number", part="step", item="1b bf16", name="speed", value=float("nan"), unit="tokens/s")
    with open(whole.lines, "a") as torn:
        torn.write('{"kind": "number", "pa')
    found = records.read(whole.lines)
    assert found == whole.every and found[-1]["value"] is None
    busy = whole.add("number", part="facts", item="card", name="busy", value="9.0 GB of its memory are taken", unit="")
    assert "**The card was busy: 9.0 GB of " in page.markdown([*found, busy])
    assert page.document(found)["busy"] == ""
    assert page.headline(found) == "WRONG: a/b: off." and "not measured" in page.markdown(found)
    whole.close()


def written(out: Path, complete: bool, began: str) -> records.Records:
    made = records.Records(out)
    made.add("run", command="x", began=began, limit_s=60, label="")
    made.named("card-abcdef0")
    made.finish(complete)
    made.close()
    return made


def test_only_a_complete_run_replaces_an_older_report_and_says_so(tmp_path: Path) -> None:
    written(tmp_path, True, "Monday")
    assert {path.name for path in tmp_path.iterdir()} == {f"card-abcdef0.{kind}" for kind in ("md", "json", "jsonl")}
    for name in ("card-abcdef0-partial", "card-abcdef0-partial-2"):
        cut = written(tmp_path, False, "Tuesday")
        assert cut.markdown == tmp_path / f"{name}.md" and "Replaces" not in cut.markdown.read_text()
    assert "Monday" in (tmp_path / "card-abcdef0.md").read_text()
    report = written(tmp_path, True, "Wednesday").markdown.read_text()
    assert "Wednesday" in report and "Replaces card-abcdef0.md of Monday." in report
    assert {path.stem for path in tmp_path.iterdir()} == {
        "card-abcdef0",
        "card-abcdef0-partial",
        "card-abcdef0-partial-2",
    }


def test_uncommitted_changes_are_named_in_the_commit_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "ROOT", tmp_path)
    assert [part.partition(":")[0] for part in facts.commit()] == ["unknown", "unknown"]
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    code = tmp_path / "code.py"
    code.write_text("1")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "card.md").write_text("what a run writes")
    head, name = facts.commit()
    assert re.fullmatch("[0-9a-f]{40}", head) and name == head[:7]
    said = set()
    for change in (
        lambda: code.write_text("2"),
        lambda: (tmp_path / "new.py").write_text("3"),
        lambda: code.write_text("4"),
    ):
        change()
        about, name = facts.commit()
        assert name == f"{head[:7]}-changed" and re.fullmatch(f"{head} and changes [0-9a-f]{{7}}", about)
        said.add(about)
    assert len(said) == 3


@pytest.mark.parametrize(
    ("states", "state"),
    [(["done", "hung"], "done"), (["hung", "failed"], "failed"), (["not run"], "not run"), ([], "done")],
)
def test_a_part_without_a_done_item_is_not_done(states: list[str], state: str) -> None:
    part = pool.Pool(PARTS[3], Settings("cpu"), {}, None, lambda record: None, lambda: False)  # type: ignore[arg-type]
    part.states = dict(zip("abc", states))
    assert part._all_ended().state == state


def computing(chosen: str, by: str) -> dict[str, Any]:
    return {
        "kind": "computing",
        "part": "step",
        "item": "1b bf16",
        "op": "attention",
        "chosen": chosen,
        "by": by,
        "why": "no",
    }


def test_the_report_shows_a_fallback_in_the_step_in_bold_and_in_the_headline() -> None:
    timed = {"kind": "number", "part": "step", "item": "1b bf16", "name": "first step, cold", "value": 1.0, "unit": "s"}
    run = {"kind": "run", "command": "", "began": "", "limit_s": 60}
    every = [run, computing("varlen, flex, reference", "flex"), timed]
    assert "| **attention: flex, for varlen** |" in page.markdown(every)
    assert "attention by flex for varlen (1b " in page.headline(every)
    sound = [run, computing("varlen", "varlen"), timed]
    assert "| attention: varlen |" in page.markdown(sound) and "fallback" not in page.headline(sound)


def test_the_headline_tells_of_another_process_on_the_device() -> None:
    look = {
        "kind": "look",
        "part": "fast",
        "when": "before",
        "clock": 1980.0,
        "power": 71.2,
        "temperature": None,
        "processes": 2,
    }
    every = [{"kind": "run", "command": "", "began": "", "limit_s": 60}, look]
    assert page.headline(every).startswith("nothing was judged; ") and "2 other processes" in page.headline(every)
    assert "before 'fast' 1980 MHz, 71 W, – °C." in page.markdown(every)


@pytest.mark.parametrize(
    ("again", "wrong"),
    [((97, 97, 0.0), True), ((90, 97, 0.001), False)],
    ids=["the device repeats itself", "it does not"],
)
def test_a_resumed_run_is_wrong_only_if_the_device_repeats_its_results(
    again: tuple[int, int, float], wrong: bool
) -> None:
    from benchmarks.gpu import chain
    from benchmarks.gpu.worker import Context

    out = io.StringIO()
    chain.compared((80, 97, 0.5), again, Context(PARTS[-1], Settings("cpu"), out))
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    assert ["17 of 97 tensors differ" in record["why"] for record in found if record["kind"] == "wrong"] == [
        True
    ] * wrong
