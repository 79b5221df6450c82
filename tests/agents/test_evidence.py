"""The first message to the model: it has what a first patch needs, and little else."""

from __future__ import annotations

from typing import Any

import pytest

from agents.core.workbench import AgentWrittenLines, EarlierProposal, UnreadableFileError
from agents.kernel_engineer.evidence import (
    FILE_CHARACTERS,
    LEAST_ROW,
    SOURCE_CHARACTERS,
    collect_evidence,
    find_neighbours,
)
from agents.kernel_engineer.prompts import SYSTEM, make_task_message
from agents.kernel_engineer.targets import ProfileTarget, find_targets
from factory.core.workspace import find_checkout_root
from factory.git.scope import AgentsPolicy
from kernels.contract.registry import OPS
from tests.support.factory.engineer import profile
from tests.support.paths import ROOT

CHARACTERS_OF_A_TOKEN = 4  # an estimate that is usual for English and code


class Bench:
    """A workbench that reads this checkout, with the shipped policy. ``past``: earlier proposals by target."""

    def __init__(self, past: dict[str, list[EarlierProposal]] | None = None) -> None:
        self.past = past or {}
        self.policy = AgentsPolicy.load(find_checkout_root() / "policies" / "agents.yaml")

    def files(self, patchable: bool = False) -> list[str]:
        every = [
            str(path.relative_to(ROOT)) for folder in ("kernels", "trainer") for path in (ROOT / folder).rglob("*.*")
        ]
        return sorted(filter(self.policy.is_patchable if patchable else self.policy.is_shown, every))

    def read(self, path: str) -> str:
        if path not in self.files():
            raise UnreadableFileError("test.unreadable", "{path}", path=path)
        return (ROOT / path).read_text(encoding="utf-8")

    def find_agent_written_lines(self, path: str) -> list[AgentWrittenLines]:
        return [AgentWrittenLines(1, 2, "search", 3)] if path.endswith("swiglu/cpp.py") else []

    def list_earlier_proposals(self, target: str) -> list[EarlierProposal]:
        return self.past.get(target, [])

    def list_earlier_tries(self, target: str) -> list[str]:
        return [f"tried on {target}: 0.9x"] if self.past else []


def _evidence(found: dict[str, Any], name: str, past: dict[str, list[EarlierProposal]] | None = None) -> str:
    bench = Bench(past)
    target = next(target for target in find_targets(found, bench.files(patchable=True)) if target.name == name)
    return make_task_message(target, collect_evidence(found, bench, target), 3)  # type: ignore[arg-type]


def test_the_first_message_has_machine_calls_times_sources_and_earlier_work() -> None:
    past = {
        "kernel:swiglu": [EarlierProposal("", "reject", "no gain", "a table of exponents")],
        "file:trainer/model/transformer.py": [EarlierProposal("", "hold", "noise", "no copies")],
    }
    told = _evidence(profile(), "kernel:swiglu", past)
    for part in (
        "L2 cache: 1024 KiB",
        "vector units: avx2, fma",
        "10.0 GB/s",
        "4 calls a step with (bfloat16[1024, 384] strides (768, 1)",
        "implementation reference (runs now): 2.100 ms alone",
        "implementation native: not timed",
        "20% of the roofline",
        "def reference(gate_XF",
        "extern",  # of swiglu.cpp
        "were written by the agent search in proposal 3",
        "reject: a table of exponents: no gain",
        "file:trainer/model/transformer.py: hold: no copies: noise",
        "file:trainer/model/transformer.py: tried on file:trainer/model/transformer.py: 0.9x",
        "tried on kernel:swiglu: 0.9x",
    ):
        assert part in told, part
    assert "kernels/contract/data/packing.py" not in told


def test_rows_that_could_not_matter_and_the_rest_of_the_recipe_are_left_out() -> None:
    found = profile()
    found["recipe"] = {"name": "x", "model": {"d_model": 7, "rope": "SECRET"}, "stability": {"z_loss": "SECRET"}}
    small = {**found["lines"][2], "line": 77, "share": LEAST_ROW / 2, "source": "nothing to gain"}
    found["lines"].append(small)
    told = _evidence(found, "kernel:swiglu")
    assert "d_model 7" in told and "SECRET" not in told and "nothing to gain" not in told


@pytest.mark.parametrize("op", sorted(OPS))
def test_the_first_message_of_every_op_leaves_room_for_a_patch_in_20_000_tokens(op: str) -> None:
    """A reply with a patch takes some 4,000 tokens."""
    told = _evidence(profile(op), f"kernel:{op}")
    assert (len(SYSTEM) + len(told)) / CHARACTERS_OF_A_TOKEN < 12_000
    assert f"kernels/{op}/__init__.py" in told


def test_a_long_file_is_shown_around_its_hot_lines_only() -> None:
    found = profile()
    path = "trainer/model/transformer.py"
    line = found["lines"][3] | {"file": path, "line": 150, "share": 0.2}
    found["lines"][3] = line
    text = (ROOT / path).read_text(encoding="utf-8")
    assert len(text) > FILE_CHARACTERS, "the file must be one that does not fit"
    told = _evidence(found, f"file:{path}")
    assert text.split("\n")[149] in told and text.split("\n")[120] not in told
    assert len(told) < SOURCE_CHARACTERS + 6000


def test_neighbours_are_the_targets_that_exchange_the_most_bytes() -> None:
    found = profile()
    at = "kernels/swiglu/__init__.py:18#swiglu"
    found["edges"] = [
        {"source": at, "target": "trainer/model/block.py:9", "conditional": False, "bytes": 1.0},
        {"source": "kernels/rms_norm/__init__.py:24#rms_norm", "target": at, "conditional": False, "bytes": 5.0},
        {"source": "trainer/run.py:1", "target": "trainer/run.py:2", "conditional": False, "bytes": 9.0},
    ]
    target = ProfileTarget("kernel:swiglu", "swiglu", ("kernels/swiglu/__init__.py:18",), 0.1, 0.08)
    assert find_neighbours(found, target) == ["kernel:rms_norm", "file:trainer/model/block.py"]
