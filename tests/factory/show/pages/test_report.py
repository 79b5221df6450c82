"""Each page is one file with the facts of the ledger. Text from outside never becomes markup."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import sqlalchemy as sa
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.special import stdtrit

from agents.core.pages import escape_html, format_number
from factory.core.workspace import Workspace
from factory.ledger.ledger import (
    Ledger,
    documents,
    eval_items,
    evaluations,
    releases,
    segments,
    shards,
    verdicts,
)
from factory.show.pages import proposal_report
from factory.show.pages.release_pictures import draw_release_pictures
from factory.show.pages.release_report import render_report
from factory.show.pages.svg_charts import draw_bars, draw_curves, draw_intervals
from tests.support.plants.release_scene import add_candidate, add_segment, add_shard, add_verdict, write_metrics

VOID = {"meta", "rect", "line", "circle", "polyline", "br"}
ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "main", "section", "h1", "h2", "h3", "p", "span", "ul", "li", "dl", "dt", "dd",
    "div", "table", "thead", "tbody", "tr", "th", "td", "pre", "code", "i", "svg", "g", "text", "rect", "line", "circle", "polyline",
}  # fmt: skip


class Reader(HTMLParser):
    """Checks that every element is one of ours and closed in order; collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag in ALLOWED, tag
        self.check(attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        assert tag in ALLOWED, tag
        self.check(attrs)

    def check(self, attrs: Any) -> None:
        for name, value in attrs:
            assert not name.startswith("on") and name not in ("src", "href", "srcdoc"), (name, value)
            assert "//" not in value and "url(" not in value, f"{name}={value!r} reads something from elsewhere"

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        assert "style" not in self.open or ("//" not in data and "url(" not in data), "a style reads from elsewhere"
        self.words.append(data)


def read(page: str) -> str:
    """The words of a page, once it is known to be well-formed, harmless and on its own."""
    page.encode("utf-8")
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    assert "<script" not in page
    return " ".join(" ".join(reader.words).split())


@pytest.fixture
def candidate(workspace: Workspace, ledger: Ledger) -> int:
    add_shard(ledger)
    trunk = add_segment(workspace, ledger, "trunk")
    write_metrics(Path(trunk.folder) / "metrics.jsonl", 0, 100)
    found = add_candidate(workspace, ledger)
    with ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == 2).values(parent=1, first_step=100, last_step=200))
        tx.execute(
            shards.insert().values(
                sha256="q" * 64,
                name="bad<i>.jsonl",
                path="x",
                bytes=1,
                state="quarantined",
                reason="truncated JSON",
                rows=9,
                tokens=0,
                ingested_at=1.0,
            )  # fmt: skip
        )
    write_metrics(workspace.segments / "0002-anneal" / "metrics.jsonl", 100, 200)
    return found


def test_a_release_report_shows_verdict_evaluation_data_and_lineage_of_the_ledger(
    ledger: Ledger, candidate: int
) -> None:
    verdict = add_verdict(ledger, candidate)
    with ledger.begin() as tx:
        row = {"number": 7, "candidate": candidate, "verdict": verdict, "state": "decided", "approved_by": "ada"}
        tx.execute(releases.insert().values(created_at=1.0, **row))
    words = read(render_report(ledger, candidate))
    for expected in (
        "Release 7", "promote", "bpb over all domains fell by 0.12", "ada", "absolute floors",
        "2.100", "2.900", "3.400", "33.0 %", "✓ tokenizer", "✗ smoke", "did not stop by itself; its code parses",
        "code-00.jsonl", "exact_duplicate 3, too_short 2", "bad<i>.jsonl", "truncated JSON",
        "anneal 2", "trunk 1", "100 → 200", "c" * 10, "r" * 10, "noise floor", "90,000",
    ):  # fmt: skip
        assert expected in words, expected
    assert words.index("promote") < words.index("2.100"), "the verdict comes first"


def test_a_comparison_shows_the_champion_and_the_intervals(
    workspace: Workspace, ledger: Ledger, candidate: int
) -> None:
    second = add_candidate(workspace, ledger)
    with ledger.begin() as tx:
        better = {"bpb": {"code": 1.912}, "baselines": {}}
        tx.execute(evaluations.update().where(evaluations.c.candidate == second).values(summary=better))
    add_verdict(ledger, second, against=candidate)
    gain = {"gain": 0.12, "error": 0.02 / 1.959964, "clusters": 10**6, "effective": 1e6}
    with ledger.begin() as tx:
        tx.execute(verdicts.update().values(evidence={"target": gain, "guards": {"code": gain, "docs": None}}))
    words = read(render_report(ledger, second))
    assert "candidate 1" in words and "1.912" in words and "2.100" in words
    assert words.count("+0.1200 (+0.1000 … +0.1400)") == 2


def test_a_report_begins_with_the_summary_for_a_release_manager(
    workspace: Workspace, ledger: Ledger, candidate: int
) -> None:
    second = add_candidate(workspace, ledger)
    verdict = add_verdict(ledger, second, against=candidate)
    gain = lambda value: {"gain": value, "error": 0.02 / 1.959964, "clusters": 12, "effective": 1e6}
    evidence = {
        "target": gain(0.12), "guards": {"code": gain(0.12), "docs": gain(-0.1), "cloze": gain(0.01)},
        "bits_per_byte": {"code": 2.0, "docs": 2.1}, "champion_bits_per_byte": {"code": 2.12, "docs": 2.0},
        "cloze": 0.31, "champion_cloze": 0.3,
    }  # fmt: skip
    with ledger.begin() as tx:
        tx.execute(verdicts.update().where(verdicts.c.id == verdict).values(evidence=evidence))
        key = {
            "id": "d",
            "shard": "s" * 64,
            "content_sha256": "d",
            "releasable": True,
            "tokens": 9000,
            "domain": "code",
        }
        tx.execute(
            documents.insert().values(
                key="d", row=0, fate="train", token_shard="t" * 64, supervised_tokens=9000, license="MIT", **key
            )
        )
    words = read(render_report(ledger, second))
    glance = words[: words.index("Gain over the champion")]
    for expected in (
        "Better code 2.120 → 2.000 bits per byte", "Worse docs 2.000 → 2.100 bits per byte", "Not shown cloze 30.0 % → 31.0 % right",
        "+0.120 (95 % interval: +0.100 to +0.140)", "on 12 sources", "steps on 1 token shard with 9,000 tokens",
        "by domain: code 100.0 %; by licence: MIT 100.0 %", f"'factory releases approve {second}'",
    ):  # fmt: skip
        assert expected in glance, expected
    with ledger.begin() as tx:
        tx.execute(verdicts.update().where(verdicts.c.id == verdict).values(outcome="hold"))
    assert "The reasons are below." in read(render_report(ledger, second))
    todo = "To do: train on ('factory run')."
    with ledger.begin() as tx:
        tx.execute(verdicts.update().where(verdicts.c.id == verdict).values(reasons=[todo, "Not shown to be better."]))
    assert f"Nothing is released. {todo} " in read(render_report(ledger, second))


def test_pictures_show_the_95_percent_interval_of_each_bits_per_byte_value(
    workspace: Workspace, ledger: Ledger, candidate: int
) -> None:
    """The interval of a level is that of a ratio over clusters, worked out here by hand for clusters of one size."""
    with ledger.begin() as tx:
        tx.execute(eval_items.delete())
        for number, nats in enumerate((10.0, 12.0, 14.0, 16.0)):
            item = {"task": "bpb", "item": f"s{number}:1", "domain": "code", "cluster": f"s{number}", "value": nats}
            tx.execute(eval_items.insert().values(evaluation=1, weight=10.0, **item))
    made = draw_release_pictures(ledger, candidate)
    assert set(made) == {"bits_per_byte.svg", "loss.svg"}, "nothing to gain over"
    for svg in made.values():
        assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    bits = [nats / 10 / math.log(2) for nats in (10.0, 12.0, 14.0, 16.0)]
    mean = sum(bits) / 4
    error = math.sqrt(sum(((one - mean) / 4 / (1 - 1 / 4)) ** 2 for one in bits))
    width = stdtrit(3, 0.975) * error
    assert f"2.100  ({mean - width:.3f} … {mean + width:.3f})" in made["bits_per_byte.svg"]


def test_missing_measurements_and_files_are_left_out_of_the_report(
    workspace: Workspace, ledger: Ledger, candidate: int
) -> None:
    for path in workspace.segments.rglob("metrics.jsonl"):
        path.unlink()
    with ledger.begin() as tx:
        tx.execute(sa.text("DELETE FROM eval_items"))
        tx.execute(evaluations.delete())
    words = read(render_report(ledger, candidate))
    assert "Candidate 1 not judged" in words and "Bits per byte" not in words and "Checks" not in words
    assert "Training loss" not in words


def test_a_release_report_escapes_hostile_text(ledger: Ledger, candidate: int) -> None:
    made = render_report(ledger, candidate)
    words = read(made)
    assert "<script>alert(1)</script>" in words and "&lt;script&gt;alert(1)" in made
    assert "\x1b" not in made and "\u202e" not in made and "onerror=alert(2)&gt;" in made


def test_a_report_is_written_despite_broken_files_and_values_of_unexpected_types(
    workspace: Workspace, ledger: Ledger, candidate: int
) -> None:
    metrics = workspace.segments / "0002-anneal" / "metrics.jsonl"
    metrics.write_bytes(b'\xff\xfe\n{"step": 3}\n[1]\n{"step": 150, "loss": NaN}\n{"step": 151, "loss": "x"}\n')
    odd = {"bpb": {"code": None, "<b>": float(3)}, "samples": {"no": "list"}, "cloze": [], "parity": {"x": False}}
    with ledger.begin() as tx:
        tx.execute(evaluations.update().values(summary=odd))
    words = read(render_report(ledger, candidate))
    assert "3.000" in words and "✗ x" in words


FACTS: dict[str, Any] = {
    "number": 3, "title": "fuse <loss>", "agent": "search", "target": "kernel:loss", "predicted_gain": 1.18,
    "hypothesis": "line 118 takes 31 % of the step", "outcome": "reject", "reasons": ["within the noise"],
    "patch": "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-old <i>\n+new\n\n",
    "evidence": {"gain": {"ratio": 1.0412, "lower": 0.99, "noise": 0.02}, "tries": 2, "stages": {}},
}  # fmt: skip


def stages(**found: Any) -> dict[str, Any]:
    return FACTS | {"evidence": FACTS["evidence"] | {"stages": found}}


def test_proposal_report_shows_hypothesis_stages_and_patch() -> None:
    scope = {"state": "passed", "reasons": ["in scope"], "files": ["policies/kernels.yaml", "kernels/x.py"]}
    timing = {
        "state": "failed",
        "reasons": ["</td><b>"],
        "ratio": 1.0412345,
        "largest_error": 3.2e-6,
        "stage_seconds": 4.5,
    }
    made = proposal_report.render_proposal(stages(scope=scope, step_timing=timing))
    words = read(made)
    for expected in ("Proposal 3: fuse <loss>", "reject", "within the noise", "31 %", "1.180×", "in scope", "4.5"):
        assert expected in words, expected
    for expected in (
        "at least 0.990",
        "1.0412",
        "3.2e-06",
        "policies/kernels.yaml, kernels/x.py",
        "-old <i>",
        "</td><b>",
    ):
        assert expected in words, expected
    assert words.index("scope") < words.index("step timing")
    assert re.search(r'<span class="at">\+\+\+ b/x', made) and '<span class="add">+new' in made


def test_a_proposal_report_shows_a_repeated_measurement_beside_the_first() -> None:
    first = {"state": "passed", "reasons": ["a"], "drift": 0.125, "seconds": {"baseline": [1.5, 2.5]}, "noise": 0.5}
    again = {"state": "passed", "reasons": ["b"], "drift": 0.25, "seconds": {"baseline": [3.5, 4.5]}}
    made = proposal_report.render_proposal(stages(training=first | {"again": again}))
    words = read(made)
    assert "first again drift 0.125 0.25 " in words
    assert "baseline 1.5, 2.5 baseline 3.5, 4.5" in words and "noise 0.5 –" in words
    assert "{" not in made.split("</style>")[1], "no raw JSON"


@settings(max_examples=30, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=8) | st.integers(),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)))  # fmt: skip
def test_a_proposal_report_takes_measurements_of_any_shape(value: Any) -> None:
    assert "Proposal 3" in read(
        proposal_report.render_proposal(stages(oracle={"state": "passed", "reasons": [], "found": value}))
    )


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec=None)))
@example("http://elsewhere url(x)")
def test_a_proposal_report_escapes_any_text(words: str) -> None:
    hostile = {"title": words, "hypothesis": words, "patch": words, "reasons": [words], "agent": words}
    made = proposal_report.render_proposal(FACTS | hostile)
    shown = read(made)
    assert "<" not in escape_html(words) and made.count("<script") == 0
    assert " ".join(words.split()).replace("\x00", "\ufffd") in shown or not words.isprintable()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(), st.floats())),
    st.dictionaries(st.text("<&'\"XYZ", max_size=5), st.floats(), max_size=4),
)
def test_charts_can_be_drawn_from_any_numbers(points: list[tuple[float, float]], values: dict[str, float]) -> None:
    """However large, or not finite at all; a name may not look like a number that is not."""
    big = lambda value: abs(value) > 1e100
    values = {name: value for name, value in values.items() if not big(value)}
    drawn = [
        draw_curves({"all": points}),
        draw_bars({"<g>": values}, list(values)),
        draw_intervals({n: (v, v, v) for n, v in values.items()}),
    ]
    made = "".join(drawn)
    read(made)
    assert "nan" not in made and "inf" not in made


def test_a_missing_number_is_shown_as_a_dash() -> None:
    assert [format_number(v) for v in (None, float("nan"), True, 1234567, 1.5)] == ["–", "–", "–", "1,234,567", "1.500"]
