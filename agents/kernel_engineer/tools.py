"""The kernel engineer's tools, which read evidence or try edits in the sandbox. Their answers are cut to a limit and marked as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from agents.core.untrusted import quote_as_data
from agents.core.workbench import TriedVariant, Variant, Workbench
from agents.kernel_engineer.draft import read_variants
from agents.kernel_engineer.evidence import LEAST_ROW, describe_machine, describe_row, describe_step
from agents.kernel_engineer.targets import ProfileTarget
from agents.loop import tools
from agents.loop.role import DraftError
from agents.loop.tools import DECLINE_TOOL, NUMBER, PROPOSE, READING, TEXT, TRY, make_tool

MOST_ROWS = 40
MOST_PROBLEMS = 6  # of one variant
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
EDITS = {"type": "array", "items": EDIT}
VARIANT = {"type": "object", "properties": {"name": TEXT, "edits": EDITS}, "required": ["name", "edits"]}
TOOLS = (
    *READING,
    make_tool("line_profile", "Time, traffic and work of source lines, hottest first.", only=TEXT | {"description": "an op or a file"}),
    make_tool("graph", "Which lines feed which, and what could be fused.", line=TEXT | {"description": "file:line; empty: all"}),
    make_tool("roofline", "The machine's measured rates, and every op's share of the step."),
    make_tool("earlier_proposals", "What was proposed, tried and declined for this target before, and why it was kept or not."),
    make_tool(
        TRY,
        "Try several variants of a patch at once: start-up is paid once. The table says of each whether its results are right, how "
        "fast its ops are alone, and how fast the whole step is, beside the present code. This is no proposal yet.",
        ("variants",),
        variants={"type": "array", "items": VARIANT},
    ),
    make_tool(
        PROPOSE,
        "Propose the patch.",
        ("title", "hypothesis", "predicted_gain", "bytes_saved", "flops_saved"),
        title=TEXT | {"description": "one line"},
        hypothesis=TEXT | {"description": "what takes the time, what the patch changes, what follows"},
        predicted_gain=NUMBER | {"description": "the whole step's time before over after, such as 1.05"},
        bytes_saved=NUMBER | {"description": "memory traffic saved a step"},
        flops_saved=NUMBER | {"description": "work saved a step"},
        edits=EDITS | {"description": "empty: those of a variant of try_patch"},
        variant=TEXT | {"description": "with empty edits: the name of that variant"},
    ),
    DECLINE_TOOL,
)  # fmt: skip


class EvidenceReader:
    """Answers the tools for one target, from a parsed profile.json and the workbench."""

    def __init__(self, profile: Mapping[str, Any], workbench: Workbench, target: ProfileTarget) -> None:
        self.profile, self.workbench, self.target = profile, workbench, target

    def answer_call(self, name: str, arguments: str) -> str:
        """The tool's answer, or the reason why there is none."""
        known: dict[str, Callable[..., str]] = {
            "list_files": lambda: tools.list_files(self.workbench),
            "read_file": partial(tools.read_file, self.workbench),
            "line_profile": self.describe_line_profile,
            "graph": self.describe_data_flow,
            "roofline": self.describe_roofline,
            "earlier_proposals": self.describe_earlier_proposals,
            TRY: self.try_patch,
        }
        return tools.answer_tool_call(known, name, arguments)

    def try_patch(self, variants: Any = None, edits: Any = None) -> str:
        """The table of the variants: what is wrong with each, or its times. The code under test takes the times."""
        try:
            read = read_variants(variants, edits, self.workbench)
        except DraftError as error:
            return str(error)
        right = [one for one in read.values() if isinstance(one, Variant)]
        table = self.workbench.try_variants(right, self.target.op, self.target.name) if right else None
        rows = {row.name: _describe_tried_variant(row) for row in (table.rows if table else ())}
        words = [rows[name] if isinstance(one, Variant) else f"{name}: {one}" for name, one in read.items()]
        return quote_as_data("variants", "\n".join([*words, *([f"{table.budget}."] if table else [])]))

    def describe_line_profile(self, only: str = "") -> str:
        asked = [line for line in self.profile["lines"] if only in ("", line["op"], line["file"])]
        rows = [line for line in asked if line["share"] >= LEAST_ROW][:MOST_ROWS]
        known = set(self.workbench.files())
        places = dict.fromkeys((row["file"], row["line"]) for row in rows if row["file"] in known)
        notes = "".join(tools.describe_agent_written_lines(self.workbench, file, line, line) for file, line in places)
        return notes + quote_as_data(
            "line profile", "\n".join(map(describe_row, rows)) or "no such op or file, or too small a share of the step"
        )

    def describe_data_flow(self, line: str = "") -> str:
        near = lambda name: not line or name.partition("#")[0] == line
        edges = [e for e in self.profile["edges"] if near(e["source"]) or near(e["target"])]
        words = [f"{e['source']} → {e['target']}: {e['bytes'] / 1e6:.2f} MB read" for e in edges[:MOST_ROWS]]
        fusions = [c for c in self.profile["fusion_candidates"] if any(near(name) for name in c["lines"])]
        words += [
            f"could be fused: {' + '.join(c['lines'])}: {c['bytes_saved'] / 1e6:.2f} MB less, at most {c['gain_share']:.1%} of the step"
            for c in fusions[:MOST_ROWS]
        ]
        return quote_as_data("graph", "\n".join(words) or "no such line")

    def describe_roofline(self) -> str:
        return quote_as_data("roofline", "\n".join([*describe_machine(self.profile), *describe_step(self.profile)]))

    def describe_earlier_proposals(self) -> str:
        return tools.quote_earlier_proposals(
            self.workbench.list_earlier_proposals(self.target.name), self.workbench.list_earlier_tries(self.target.name)
        )


def _describe_tried_variant(row: TriedVariant) -> str:
    """A variant's row of the table, with a line for each problem or time."""
    known = " (from an earlier call)" if row.known else ""
    if not row.check.ok:
        return "\n  ".join([f"{row.name}: wrong ({row.check.stage}){known}", *row.check.problems[:MOST_PROBLEMS]])
    what = "the changed files can be imported" if row.check.stage == "import" else "its results are right"
    return "\n  ".join([f"{row.name}: {what}{known}", *row.times])
