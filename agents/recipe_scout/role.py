"""The recipe scout as a language model: the same record, edits and gate as the scout without one."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from functools import partial

from agents.core.proposal import QUALITY, Proposal, gain_words
from agents.core.untrusted import quoted
from agents.core.workbench import Workbench
from agents.core.yaml_edit import values
from agents.loop import tools
from agents.loop.role import Aim, JsonObject, TargetError
from agents.loop.tools import NUMBER, PROPOSE, READING, TEXT, tool
from agents.recipe_scout import prompts
from agents.recipe_scout.changes import all_changes
from agents.recipe_scout.course import Course
from agents.recipe_scout.draft import read_change
from agents.recipe_scout.scout import AGENT, tried

MOST_IDEAS = 12
CHANGE = {
    "type": "object",
    "properties": {"key": TEXT, "value": {"type": ["number", "string"]}},
    "required": ["key", "value"],
}
TOOLS = (
    *READING,
    tool("record", "The trunk's course: losses, gradients, anomalies, slopes."),
    tool("ideas", "Changes that simple rules suggest, with the gain that they predict."),
    tool("earlier_proposals", "Which changes were tried before, and why they were kept or not."),
    tool(
        PROPOSE,
        "Propose the change.",
        ("changes", "hypothesis", "predicted_gain"),
        changes={"type": "array", "items": CHANGE},
        hypothesis=TEXT | {"description": "what the record shows, what the change does to learning, what follows"},
        predicted_gain=NUMBER | {"description": "bits per byte on held-out documents, such as 0.01"},
    ),
)


class RecipeScout:
    """``agents.loop.role.Role`` over a trunk's course. ``asked``: a key that a person named, or ''."""

    name = AGENT
    system = prompts.SYSTEM
    tools: Sequence[JsonObject] = TOOLS

    def __init__(self, course: Course, workbench: Workbench, asked: str = "") -> None:
        self.course, self.workbench, self.asked = course, workbench, asked

    def aim(self, rounds: int) -> Aim | str:
        """Raises: TargetError for a key that may not be changed, or that no recipe has."""
        course = self.course
        keys = [key for key in values(course.recipe) if course.may_change(key)]
        if self.asked and self.asked not in keys:
            near = difflib.get_close_matches(self.asked, keys, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(keys)}"
            raise TargetError(f"target {self.asked!r} is not a key of the recipe that may be changed; {hint}")
        if not keys:
            return "the recipe gate allows no key of the recipe to be changed"
        text = self.workbench.read(course.path)
        lines = len(text.splitlines())
        recipe = tools.authors(self.workbench, course.path, 1, lines) + quoted(course.path, text, 40_000)
        evidence = "\n\n".join((recipe, self.record(), self.ideas(), self.earlier_proposals()))
        about = f"recipe {course.recipe.name} at step {course.step}, a loss that falls by {course.slope:.3f} bits per byte for e times the tokens"
        return Aim(prompts.task(course, keys, self.asked, evidence, rounds), about, {})

    def answer(self, facts: JsonObject, tool: str, arguments: str) -> str:
        known: dict[str, Callable[..., str]] = {
            "list_files": lambda: tools.list_files(self.workbench),
            "read_file": partial(tools.read_file, self.workbench),
            "record": self.record,
            "ideas": self.ideas,
            "earlier_proposals": self.earlier_proposals,
        }
        return tools.answered(known, tool, arguments)

    def draft(self, facts: JsonObject, arguments: str, tried: str) -> Proposal:
        """Raises: DraftError."""
        return read_change(arguments, self.course, self.workbench.read(self.course.path), self.asked)

    def check(self, facts: JsonObject, draft: Proposal) -> str:
        """Scope and static stage."""
        return tools.problems_of(self.workbench.check(draft.edits))

    def record(self) -> str:
        course = self.course
        slopes = ", ".join(f"{name} {slope:.3f}" for name, slope in course.domain_slopes.items())
        scale = f"{course.noise_scale:,.0f}" if course.noise_scale else "not measured"
        words = [
            f"bits per byte that the loss falls by for e times the tokens: {course.slope:.3f}; by domain: {slopes}",
            f"gradient noise scale: {scale} supervised tokens; a step has {course.supervised:,.0f}",
            f"{course.clipped:.0%} of the later steps were clipped; the z-loss is {course.z_share:.2%} of the loss",
            f"anomalies that a lower rate may avoid: {course.trouble}",
            *course.sample,
        ]
        return quoted("record of the trunk", "\n".join(words))

    def ideas(self) -> str:
        rate_tried = tried(self.course.recipe.optimizer.lr, self.workbench.history(f"{QUALITY}:optimizer.lr"))
        found = [c for c in all_changes(self.course, rate_tried) if self.course.may_change(c.key)][:MOST_IDEAS]
        words = [f"{c.words}: {gain_words(f'{QUALITY}:{c.key}', c.gain)}, because {c.why}" for c in found]
        return quoted("what simple rules suggest", "\n".join(words) or "nothing")

    def earlier_proposals(self) -> str:
        return tools.earlier(self.workbench.history(f"{QUALITY}:"))
