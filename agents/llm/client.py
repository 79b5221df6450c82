"""Asks a language model within a budget. Each request's worst case is checked against the budget before the request is sent."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from agents.llm.exchange import (
    BudgetAccount,
    ChatMessage,
    Endpoint,
    Exchange,
    LlmError,
    Reply,
    Request,
    SendError,
    Usage,
)
from agents.llm.policy import LlmPolicy
from kernels.contract.message import Message

FIRST_WAIT = 1.0  # seconds before the second attempt, at most; doubled each time


class LlmClient:
    """Sends requests to an endpoint, under a policy, and records them in ``books``. ``say`` tells a person why the client waits."""

    def __init__(
        self,
        endpoint: Endpoint,
        policy: LlmPolicy,
        books: BudgetAccount,
        say: Callable[[str], None] = lambda _: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.endpoint, self.policy, self.books, self.say, self.sleep = endpoint, policy, books, say, sleep

    def ask(self, label: str, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]] = ()) -> Reply:
        """The model's reply. Raises: BudgetError before anything is sent; LlmError if no reply came."""
        policy = self.policy
        request = Request(label, policy.model, tuple(messages), tuple(tools), policy.temperature, policy.reply_tokens)
        for attempt in range(1, policy.attempts + 1):
            try:
                return self._once(request)
            except SendError as error:
                if not error.again or attempt == policy.attempts:
                    raise LlmError(
                        "llm.no_reply",
                        "The request to {endpoint} failed: {problem}. The factory tried {attempts:,|time|times}.",
                        endpoint=self.endpoint.name,
                        problem=error.message,
                        attempts=attempt,
                    ) from error
                wait = self._wait(error, attempt)
                self.say(
                    Message(
                        "llm.again",
                        "  The request to {endpoint} failed: {problem}. The next attempt begins in {wait:.1f} s.",
                        endpoint=self.endpoint.name,
                        problem=error.message,
                        wait=wait,
                    )
                )
                self.sleep(wait)
        raise AssertionError("unreachable")

    def _once(self, request: Request) -> Reply:
        most = request.worst_case_usage
        entry = self.books.reserve(request.label, most.tokens, self._usd(most))
        began = time.time()
        try:
            reply = self.endpoint.send(request)
        except SendError as error:
            usage = most if error.charged else Usage()
            self._settle(entry, request, began, usage, None, str(error))
            raise
        usage = reply.usage or _most(request, reply)
        self._settle(entry, request, began, usage, reply, "")
        return reply

    def _settle(
        self, entry: int, request: Request, began: float, usage: Usage, reply: Reply | None, error: str
    ) -> None:
        exchange = Exchange(
            request, self.endpoint.name, began, time.time(), usage, self._usd(usage), reply, error
        )  # fmt: skip
        self.books.settle(entry, exchange)

    def _usd(self, usage: Usage) -> float:
        return self.policy.compute_cost_in_usd(usage.input_tokens, usage.output_tokens)

    def _wait(self, error: SendError, attempt: int) -> float:
        """Seconds before the next attempt: as the endpoint asks, else exponential backoff. Jitter keeps many clients from returning at once.

        Raises: LlmError if the endpoint asks for too long a wait.
        """
        longest = self.policy.longest_wait_seconds
        if error.after is None:
            return min(longest, FIRST_WAIT * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
        if error.after > longest:
            raise LlmError(
                "llm.wait_too_long",
                "The request to {endpoint} failed: {problem}. The endpoint asks for a wait of {asked:.0f} s, longer "
                "than llm.longest_wait_seconds ({longest:g}). Run the same command again later.",
                endpoint=self.endpoint.name,
                problem=error.message,
                asked=error.after,
                longest=longest,
            ) from error
        return error.after * random.uniform(1.0, 1.1)


def _most(request: Request, reply: Reply) -> Usage:
    """The largest possible usage of a reply, for an endpoint that reports none."""
    return Usage(
        request.worst_case_usage.input_tokens,
        min(request.reply_tokens, len(json.dumps(reply.make_assistant_message()))),
    )
