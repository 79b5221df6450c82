"""The ``improve`` part of ``policies/agents.yaml``: when the daemon improves the factory without being asked, with which agents, and at what cost."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from kernels.contract.message import Message
from kernels.contract.strict import StrictSchema, make_known_words_hint

OFF, WHEN_IDLE, NIGHTLY = "off", "when-idle", "nightly"
AGENTS = ("search", "kernel-engineer", "recipe-scout")  # the rows of ``factory.code_loop.proposing.AGENTS``


def _known(agent: str) -> str:
    if agent not in AGENTS:
        raise ValueError(
            Message(
                "agents.no_agent",
                "there is no agent {agent!r}{near}",
                agent=agent,
                near=make_known_words_hint(agent, AGENTS),
            )
        )
    return agent


def _hours(night: str) -> str:
    if not re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d", night):
        raise ValueError(
            Message("agents.not_hours", "expected two times of day, such as 22:00-06:00, not {hours!r}", hours=night)
        )
    return night


class ImprovementBudget(StrictSchema):
    """Limits for any 24 hours. They are checked before a proposal is begun. A proposal that was begun is judged to its end."""

    device_seconds: float = Field(default=14_400.0, gt=0, allow_inf_nan=False)
    """Wall time of profiling, proposing and judging, multiplied by the number of devices of this machine (its GPUs; a CPU counts as one)."""
    tokens: int = Field(default=2_000_000, gt=0)
    """Tokens of the language model, input and output together. ``llm.per_proposal`` and ``llm.per_day`` hold too."""
    usd: float = Field(default=5.0, ge=0, allow_inf_nan=False)
    """Cost of the language model, at the prices in ``llm``."""


class ImprovementPolicy(StrictSchema):
    """The daemon's own improvements. Every key is optional."""

    when: Literal["off", "when-idle", "nightly"] = "off"
    """``off``: only 'factory propose' starts the agents. ``when-idle``: the daemon starts them whenever it has nothing else to do.
    ``nightly``: as ``when-idle``, but only in the hours of ``night``."""
    night: Annotated[str, AfterValidator(_hours)] = "22:00-06:00"
    """The hours in which ``nightly`` may begin a stage, in this machine's time zone. In these hours the daemon also judges held patches again,
    however busy the machine is."""
    agents: list[Annotated[str, AfterValidator(_known)]] = Field(default=["search", "kernel-engineer"], min_length=1)
    """The agents, in the order in which they work. Each works until it finds nothing more. Without an endpoint ``kernel-engineer`` is left out."""
    per_day: ImprovementBudget = ImprovementBudget()

    def allows_stage_at_minute_of_day(self, minute: int) -> bool:
        """True if ``when`` and ``night`` allow a stage to begin at that minute of the day.

        >>> (ImprovementPolicy(when="nightly").allows_stage_at_minute_of_day(23 * 60),
        ...     ImprovementPolicy(when="nightly").allows_stage_at_minute_of_day(6 * 60),
        ...  ImprovementPolicy().allows_stage_at_minute_of_day(0))
        (True, False, False)
        """
        return self.when != OFF if self.when != NIGHTLY else self.is_night_at_minute_of_day(minute)

    def is_night_at_minute_of_day(self, minute: int) -> bool:
        """True in the hours of ``night``, whatever ``when`` says.

        >>> [ImprovementPolicy(night="23:00-01:30").is_night_at_minute_of_day(minute) for minute in (0, 89, 90, 22 * 60)]
        [True, True, False, False]
        """
        first, last = (int(time[:2]) * 60 + int(time[3:]) for time in self.night.split("-"))
        return first <= minute < last if first <= last else minute >= first or minute < last
