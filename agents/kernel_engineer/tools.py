"""The tools that the model may use: they read, and nothing else. Whatever they return is bounded and marked as data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from agents.kernel_engineer.targets import Target
from agents.untrusted import one_line, quoted
from agents.workbench import ReadError, Workbench

MOST_FILE_LINES = 400
MOST_ROWS = 40
PROPOSE = "propose"


def _tool(name: str, about: str, required: tuple[str, ...] = (), **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


TEXT, WHOLE, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
EDIT = {
    "type": "object",
    "properties": {
        "path": TEXT,
        "new_text": {"type": "string", "description": "the file's whole new text; for new files"},
        "find": {"type": "string", "description": "text that occurs exactly once in the file"},
        "replace": {"type": "string", "description": "what stands there instead"},
    },
    "required": ["path"],
}
TOOLS = (
    _tool("list_files", "The files that you may read."),
    _tool("read_file", "Lines of a file.", ("path",), path=TEXT, first=WHOLE, last=WHOLE),
    _tool("line_profile", "Time, traffic and work of source lines, hottest first.", only=TEXT | {"description": "an op or a file"}),
    _tool("graph", "Which lines feed which, and what could be fused.", line=TEXT | {"description": "file:line; empty: all"}),
    _tool("roofline", "The machine's measured rates, and every op's share of the step."),
    _tool("earlier_proposals", "What was proposed for this target before, and why it was kept or not."),
    _tool(
        PROPOSE,
        "Propose the patch.",
        ("title", "hypothesis", "predicted_gain", "bytes_saved", "flops_saved", "edits"),
        title=TEXT | {"description": "one line"},
        hypothesis=TEXT | {"description": "what takes the time, what the patch changes, what follows"},
        predicted_gain=NUMBER | {"description": "the whole step's time before over after, such as 1.05"},
        bytes_saved=NUMBER | {"description": "memory traffic saved a step"},
        flops_saved=NUMBER | {"description": "work saved a step"},
        edits={"type": "array", "items": EDIT},
    ),
)  # fmt: skip


class Reader:
    """Answers the reading tools for one target, from a parsed profile.json and the workbench."""

    def __init__(self, profile: Mapping[str, Any], workbench: Workbench, target: Target) -> None:
        self.profile, self.workbench, self.target = profile, workbench, target

    def call(self, name: str, arguments: str) -> str:
        """The tool's answer; a call that cannot be answered says why."""
        known: dict[str, Callable[..., str]] = {
            "list_files": self.list_files,
            "read_file": self.read_file,
            "line_profile": self.line_profile,
            "graph": self.graph,
            "roofline": self.roofline,
            "earlier_proposals": self.earlier_proposals,
        }
        if name not in known:
            return f"There is no tool {one_line(name, 60)!r}; there are: {', '.join([*known, PROPOSE])}."
        try:
            given = json.loads(arguments or "{}")
            if not isinstance(given, dict):
                raise ValueError("expected an object")
            return known[name](**given)
        except (ValueError, TypeError, RecursionError) as error:
            return f"The arguments cannot be used: {one_line(str(error), 200)}"
        except ReadError as error:
            return one_line(str(error), 300)

    def list_files(self) -> str:
        return quoted("files", "\n".join(self.workbench.files()))

    def read_file(self, path: str, first: int = 1, last: int = MOST_FILE_LINES) -> str:
        if not isinstance(path, str) or not isinstance(first, int) or not isinstance(last, int):
            raise ValueError("path is a text, first and last are line numbers")
        lines = self.workbench.read(path).split("\n")
        first = max(1, first)
        last = min(last, len(lines), first + MOST_FILE_LINES - 1)
        return quoted(f"{path}, lines {first} to {last} of {len(lines)}", "\n".join(lines[first - 1 : last]), 40_000)

    def line_profile(self, only: str = "") -> str:
        rows = [line for line in self.profile["lines"] if only in ("", line["op"], line["file"])]
        return quoted("line profile", "\n".join(map(_row, rows[:MOST_ROWS])) or "no such op or file")

    def graph(self, line: str = "") -> str:
        near = lambda name: not line or name.partition("#")[0] == line
        edges = [e for e in self.profile["edges"] if near(e["source"]) or near(e["target"])]
        words = [f"{e['source']} → {e['target']}: {e['bytes'] / 1e6:.2f} MB read" for e in edges[:MOST_ROWS]]
        fusions = [c for c in self.profile["fusion_candidates"] if any(near(name) for name in c["lines"])]
        words += [
            f"could be fused: {' + '.join(c['lines'])}: {c['bytes_saved'] / 1e6:.2f} MB less, at most {c['gain_share']:.1%} of the step"
            for c in fusions[:MOST_ROWS]
        ]
        return quoted("graph", "\n".join(words) or "no such line")

    def roofline(self) -> str:
        p = self.profile
        recipe = p["recipe_step_s"]
        words = [
            f"device: {p['device']}; torch {p['torch']}",
            f"matrix products {p['matmul_flops_per_s'] / 1e9:.1f} GFLOP/s, memory {p['memory_bytes_per_s'] / 1e9:.1f} GB/s, both measured",
            f"step: {p['eager_step_s'] * 1e3:.1f} ms eager" + (f", {recipe * 1e3:.1f} ms as the recipe runs it" if recipe else ""),
            f"recipe: {json.dumps(p['recipe'])[:2000]}",
        ]  # fmt: skip
        words += [
            f"{o['op']} ({o['implementation']}): {o['share']:.1%} of the step, {o['calls']:g} calls" for o in p["ops"]
        ]
        return quoted("roofline", "\n".join(words))

    def earlier_proposals(self) -> str:
        found = self.workbench.history(self.target.name)
        return quoted("earlier proposals", "\n".join(f"{a.outcome}: {a.title}: {a.reason}" for a in found) or "none")

    def evidence(self) -> str:
        """What the model is told unasked."""
        own = self.target.op or self.target.name.partition(":")[2]
        return "\n\n".join((self.roofline(), self.line_profile(own), self.earlier_proposals()))


def _row(line: Mapping[str, Any]) -> str:
    return (
        f"{line['file']}:{line['line']} {line['op'] or '-'} {line['share']:.2%} of the step "
        f"(forward {line['forward_s'] * 1e3:.2f} ms, backward {line['backward_s'] * 1e3:.2f} ms, host {line['host_s'] * 1e3:.2f} ms), "
        f"{line['calls']:g} calls, {line['bytes'] / 1e6:.2f} MB, {line['flops'] / 1e6:.2f} MFLOP, bound by {line['bound']}, "
        f"{line['roofline']:.0%} of the roofline | {one_line(line['source'], 120)}"
    )
