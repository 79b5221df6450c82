"""The kernel engineer's tools, which read evidence or try edits in the sandbox. Their answers are cut to a limit and marked as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from agents.core.untrusted import quote_as_data
from agents.core.workbench import Workbench
from agents.kernel_engineer.draft import read_edits
from agents.kernel_engineer.evidence import LEAST_ROW, describe_machine, describe_row, describe_step
from agents.kernel_engineer.targets import ProfileTarget
from agents.loop import tools
from agents.loop.role import DraftError
from agents.loop.tools import NUMBER, PROPOSE, READING, TEXT, TRY, make_tool

MOST_ROWS = 40
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
TOOLS = (
    *READING,
    make_tool("line_profile", "Time, traffic and work of source lines, hottest first.", only=TEXT | {"description": "an op or a file"}),
    make_tool("graph", "Which lines feed which, and what could be fused.", line=TEXT | {"description": "file:line; empty: all"}),
    make_tool("roofline", "The machine's measured rates, and every op's share of the step."),
    make_tool("earlier_proposals", "What was proposed for this target before, and why it was kept or not."),
    make_tool(TRY, "Check edits, and time the ops that they change, alone, on the recipe's shapes. This is no proposal yet.", ("edits",),
    edits=EDITS),
    make_tool(
        PROPOSE,
        "Propose the patch.",
        ("title", "hypothesis", "predicted_gain", "bytes_saved", "flops_saved"),
        title=TEXT | {"description": "one line"},
        hypothesis=TEXT | {"description": "what takes the time, what the patch changes, what follows"},
        predicted_gain=NUMBER | {"description": "the whole step's time before over after, such as 1.05"},
        bytes_saved=NUMBER | {"description": "memory traffic saved a step"},
        flops_saved=NUMBER | {"description": "work saved a step"},
        edits=EDITS | {"description": "empty: those of the last try_patch"},
    ),
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

    def try_patch(self, edits: Any) -> str:
        """Run the quick check of edits, and time the ops whose choice they change, outside the step. The code under test takes the times."""
        try:
            edits = read_edits(edits, self.workbench)
        except DraftError as error:
            return f"The edits cannot be read: {error}"
        found = self.workbench.check(edits, self.target.op, timed=True)
        return tools.quote_problems(found) if found.problems else quote_as_data("times alone", "\n".join(found.times))

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
        return tools.quote_earlier_proposals(self.workbench.list_earlier_proposals(self.target.name))
