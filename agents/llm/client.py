"""Ask a language model within a budget, which each request's worst case is checked against before it is sent."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from agents.llm.exchange import Books, Endpoint, Exchange, LlmError, Message, Reply, Request, SendError, Usage
from agents.llm.policy import LlmPolicy

FIRST_WAIT = 1.0  # seconds before the second attempt, at most; doubled each time


class Client:
    """An endpoint, a policy, and the books. ``say`` shows a person what is waited for."""

    def __init__(
        self,
        endpoint: Endpoint,
        policy: LlmPolicy,
        books: Books,
        say: Callable[[str], None] = lambda _: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.endpoint, self.policy, self.books, self.say, self.sleep = endpoint, policy, books, say, sleep

    def ask(self, label: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Reply:
        """The model's reply. Raises: BudgetError before anything is sent; LlmError when there is none."""
        policy = self.policy
        request = Request(label, policy.model, tuple(messages), tuple(tools), policy.temperature, policy.reply_tokens)
        for attempt in range(1, policy.attempts + 1):
            try:
                return self._once(request)
            except SendError as error:
                if not error.again or attempt == policy.attempts:
                    tried = f" (tried {attempt} times)" if attempt > 1 else ""
                    raise LlmError(f"{self.endpoint.name}: {error}{tried}") from error
                wait = self._wait(error, attempt)
                self.say(f"  {self.endpoint.name}: {error}; again in {wait:.1f} s")
                self.sleep(wait)
        raise AssertionError("unreachable")

    def _once(self, request: Request) -> Reply:
        most = request.most_tokens
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
        return self.policy.usd(usage.input_tokens, usage.output_tokens)

    def _wait(self, error: SendError, attempt: int) -> float:
        """Seconds that the endpoint asks for, or exponential backoff; with jitter, so that many clients do not return at once."""
        longest = self.policy.longest_wait_seconds
        if error.after is None:
            return min(longest, FIRST_WAIT * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
        if error.after > longest:
            raise LlmError(
                f"{self.endpoint.name}: {error}; it asks to wait {error.after:.0f} s, and llm.longest_wait_seconds is {longest:g}: "
                "run the same command again later"
            ) from error
        return error.after * random.uniform(1.0, 1.1)


def _most(request: Request, reply: Reply) -> Usage:
    """The most that it can have been, for an endpoint that reports no usage."""
    return Usage(request.most_tokens.input_tokens, min(request.reply_tokens, len(json.dumps(reply.message()))))
