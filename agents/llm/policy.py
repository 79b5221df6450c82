"""The ``llm`` part of ``policies/agents.yaml``: which model, how long it may take, what it may cost."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainer.contract.strict import Strict


class Budget(Strict):
    """Hard limits: a request whose worst case would exceed either is not sent."""

    tokens: int = Field(gt=0)
    """In and out together."""
    usd: float = Field(ge=0, allow_inf_nan=False)
    """At the prices of this policy."""


class LlmPolicy(Strict):
    """Every key is optional. Nothing is spent by default: an endpoint must be named first."""

    endpoint: str = ""
    """A base URL like ``https://host/v1``, ``champion`` (our own release, served by 'factory serve'), or ``files:FOLDER``. Empty: what
    ``--endpoint`` or ``OPENAI_BASE_URL`` says. The key is never written down: it is ``OPENAI_API_KEY``, ``FACTORY_SERVE_KEY`` for the champion."""
    model: str = ""
    """Name of the model, as the endpoint knows it."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """None: the model's own (some accept no other)."""
    usd_per_million_input_tokens: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """The provider's price."""
    usd_per_million_output_tokens: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """The provider's price."""
    reply_tokens: int = Field(default=16_000, gt=0)
    """A reply of more is cut off."""
    limit_parameter: Literal["max_completion_tokens", "max_tokens"] = "max_completion_tokens"
    """The endpoint's name of that limit; some know only the older one."""
    reply_bytes: int = Field(default=4_000_000, gt=0)
    """Of a reply as it comes over the wire."""
    reply_seconds: float = Field(default=1200.0, gt=0)
    """From the request to the reply's last byte."""
    silence_seconds: float = Field(default=300.0, gt=0)
    """Longest time without a byte; a large prompt on a small machine takes minutes to the first."""
    attempts: int = Field(default=5, ge=1, le=20)
    """Attempts before a busy, failing or silent endpoint is an error."""
    longest_wait_seconds: float = Field(default=60.0, ge=0)
    """Between attempts. An endpoint that asks (Retry-After) for more is an error at once."""
    file_wait_seconds: float = Field(default=86_400.0, gt=0)
    """How long ``files:`` waits for a reply. A run that gave up continues when the command is given again."""
    rounds: int = Field(default=4, ge=1)
    """Patches that an agent may try on its quick check before it gives up."""
    exchanges: int = Field(default=40, ge=1)
    """Requests of one run of an agent."""
    per_proposal: Budget = Budget(tokens=1_000_000, usd=5.0)
    per_day: Budget = Budget(tokens=5_000_000, usd=20.0)
    """Of a UTC day, all agents of the workspace together."""
    per_diagnosis: Budget = Budget(tokens=60_000, usd=0.5)
    """Of the words about one diagnosis of the loss doctor."""
    diagnosis_seconds: float = Field(default=300.0, gt=0)
    """The longest that the factory waits for these words."""
    diagnosis_documents: int = Field(default=0, ge=0, le=10)
    """Of the documents that are to blame, how many the model is shown the beginning of: that text goes to the endpoint."""

    def for_diagnosis(self) -> LlmPolicy:
        """The same with the limits of a diagnosis: one attempt, which ends within ``diagnosis_seconds`` whatever the endpoint does."""
        half = self.diagnosis_seconds / 2  # a last byte may come that long after the time for the reply is over
        limits = {
            "attempts": 1,
            "reply_seconds": min(self.reply_seconds, half),
            "silence_seconds": min(self.silence_seconds, half),
            "file_wait_seconds": min(self.file_wait_seconds, self.diagnosis_seconds),
        }
        return self.model_copy(update=limits)

    def usd(self, input_tokens: int, output_tokens: int) -> float:
        """What tokens cost by this policy's prices."""
        prices = (self.usd_per_million_input_tokens, self.usd_per_million_output_tokens)
        return (input_tokens * prices[0] + output_tokens * prices[1]) / 1e6
