"""The kernel engineer: makes one target of the line profile faster by one patch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agents.core.proposal import Proposal
from agents.core.workbench import Workbench
from agents.kernel_engineer import prompts
from agents.kernel_engineer.draft import AGENT, read_draft
from agents.kernel_engineer.evidence import collect_evidence
from agents.kernel_engineer.targets import (
    LEAST_GAIN,
    ProfileTarget,
    find_named_target,
    find_targets,
    select_worthwhile_targets,
)
from agents.kernel_engineer.tools import TOOLS, EvidenceReader
from agents.loop.role import AgentTask, JsonObject
from agents.loop.tools import quote_problems
from kernels.contract.message import Message


class KernelEngineer:
    """The ``Role`` of the kernel engineer, for a parsed profile.json. ``asked``: the target that a person named, or ''.

    ``earlier``: other profiles of the same commit, recipe and machine. ``least_gain``: the gain of the step from which on the gate keeps a patch.
    """

    name = AGENT
    system = prompts.SYSTEM
    tools: Sequence[JsonObject] = TOOLS

    def __init__(
        self,
        profile: Mapping[str, Any],
        workbench: Workbench,
        asked: str = "",
        earlier: Sequence[Mapping[str, Any]] = (),
        least_gain: float = LEAST_GAIN,
    ) -> None:
        self.profile, self.workbench, self.asked = profile, workbench, asked
        self.earlier, self.least_gain = earlier, least_gain

    def choose_task(self, rounds: int) -> AgentTask | str:
        """The target that a person named, or the one with the most to gain. Raises: TargetError."""
        found = find_targets(self.profile, set(self.workbench.files(patchable=True)), self.earlier)
        if self.asked:
            aims = [find_named_target(self.asked, found, self.profile, self.least_gain)]
        else:
            aims = select_worthwhile_targets(found, self.workbench.list_earlier_proposals, self.least_gain)
        if not aims:
            return Message(
                "kernel_engineer.no_target", "No target in the profile promises a gain that is large enough to measure."
            )
        target = aims[0]
        evidence = collect_evidence(self.profile, self.workbench, target)
        about = Message(
            "kernel_engineer.target",
            "target {target} takes {share:.1%} of the step's time. If the target ran at the roofline, the step would be "
            "{aim:.3f}x as fast",
            target=target.name,
            share=target.share,
            aim=target.gain_at_roofline,
        )
        return AgentTask(
            prompts.make_task_message(target, evidence, rounds),
            about,
            {**vars(target), "lines": list(target.lines)},
            target.name,
        )

    def answer_tool_call(self, facts: JsonObject, tool: str, arguments: str) -> str:
        return EvidenceReader(self.profile, self.workbench, _target(facts)).answer_call(tool, arguments)

    def make_proposal(self, facts: JsonObject, arguments: str, tried: Sequence[str]) -> Proposal:
        """Raises: DraftError."""
        return read_draft(arguments, _target(facts), self.workbench, tried)

    def check_proposal(self, facts: JsonObject, draft: Proposal) -> str:
        """The problems that the quick check finds in the sandbox, which also compares the changed ops with fp64; '' if there are none."""
        return quote_problems(self.workbench.check(draft.edits, _target(facts).op))


def _target(facts: JsonObject) -> ProfileTarget:
    return ProfileTarget(**{**facts, "lines": tuple(facts["lines"])})
