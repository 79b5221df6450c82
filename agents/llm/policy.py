"""The ``llm`` part of ``policies/agents.yaml``: which model, how long it may take, what it may cost."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kernels.contract.strict import StrictSchema


class Budget(StrictSchema):
    """Hard limits: a request whose worst case would exceed either is not sent."""

    tokens: int = Field(gt=0)
    """Input and output tokens together."""
    usd: float = Field(ge=0, allow_inf_nan=False)
    """At the prices of this policy."""


class LlmPolicy(StrictSchema):
    """Every key is optional. Nothing is spent by default: an endpoint must be named first."""

    endpoint: str = ""
    """A base URL like ``https://host/v1``, ``champion`` (our own release, served by 'factory serve'), or ``files:FOLDER``. Empty: the value of
    ``--endpoint`` or ``OPENAI_BASE_URL``. The key is never stored. It is read from ``OPENAI_API_KEY``, or ``FACTORY_SERVE_KEY`` for the champion."""
    model: str = ""
    """The model's name, as the endpoint knows it."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """None: the model's own (some models accept no other)."""
    usd_per_million_input_tokens: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """The provider's price."""
    usd_per_million_output_tokens: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """The provider's price."""
    reply_tokens: int = Field(default=16_000, gt=0)
    """A longer reply is cut off."""
    limit_parameter: Literal["max_completion_tokens", "max_tokens"] = "max_completion_tokens"
    """The endpoint's name of that limit. Some endpoints know only the older name."""
    reply_bytes: int = Field(default=4_000_000, gt=0)
    """The most bytes of a reply, as received."""
    reply_seconds: float = Field(default=1200.0, gt=0)
    """The longest time from the request to the reply's last byte."""
    silence_seconds: float = Field(default=300.0, gt=0)
    """The longest time without a byte. A large prompt on a small machine takes minutes to the first byte."""
    attempts: int = Field(default=5, ge=1, le=20)
    """Attempts to get a reply from a busy, failing or silent endpoint."""
    longest_wait_seconds: float = Field(default=60.0, ge=0)
    """The longest wait between attempts. An endpoint that asks for a longer one (Retry-After) is an error at once."""
    file_wait_seconds: float = Field(default=86_400.0, gt=0)
    """How long ``files:`` waits for a reply. After that the run ends; the same command continues it."""
    rounds: int = Field(default=4, ge=1)
    """Proposals that an agent may make in one run, until one passes the quick check."""
    exchanges: int = Field(default=40, ge=1)
    """Requests that one run of an agent may make."""
    per_proposal: Budget = Budget(tokens=1_000_000, usd=5.0)
    per_day: Budget = Budget(tokens=5_000_000, usd=20.0)
    """For a UTC day, all agents of the workspace together."""
    per_diagnosis: Budget = Budget(tokens=60_000, usd=0.5)
    """For the explanation of one diagnosis of the loss doctor."""
    diagnosis_seconds: float = Field(default=300.0, gt=0)
    """The longest time that the factory waits for that explanation."""
    diagnosis_documents: int = Field(default=0, ge=0, le=10)
    """The number of documents to blame whose beginning is sent to the model's endpoint."""

    def with_diagnosis_limits(self) -> LlmPolicy:
        """The policy with the limits of a diagnosis: one attempt, which ends within ``diagnosis_seconds`` whatever the endpoint does."""
        half = self.diagnosis_seconds / 2  # the last read may take that long beyond the time for the reply
        limits = {
            "attempts": 1,
            "reply_seconds": min(self.reply_seconds, half),
            "silence_seconds": min(self.silence_seconds, half),
            "file_wait_seconds": min(self.file_wait_seconds, self.diagnosis_seconds),
        }
        return self.model_copy(update=limits)

    def compute_cost_in_usd(self, input_tokens: int, output_tokens: int) -> float:
        """The cost of tokens at this policy's prices."""
        prices = (self.usd_per_million_input_tokens, self.usd_per_million_output_tokens)
        return (input_tokens * prices[0] + output_tokens * prices[1]) / 1e6
