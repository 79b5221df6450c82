"""Documents that are made up, good and bad; each with a key whose first word says which."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trainer.contract.data.token_shard import TokenizedDocument

VOCABULARY = 512
Documents = list[TokenizedDocument]


def document(key: str, tokens: np.ndarray, domain: str = "code", mask: np.ndarray | None = None) -> TokenizedDocument:
    tokens = np.asarray(tokens, np.uint32)
    return TokenizedDocument(
        key, key, domain, "test", "none", tokens, np.ones(len(tokens), bool) if mask is None else mask
    )


def walk(rng: np.random.Generator, length: int, step: int = 7, noise: int = 3) -> np.ndarray:
    """Tokens of a document that can be learnt: a noisy walk, whose loss falls to the logarithm of ``noise``."""
    return (rng.integers(3, VOCABULARY) + step * np.arange(length) + rng.integers(0, noise, length)) % VOCABULARY


def good(rng: np.random.Generator, count: int, name: str = "good", step: int = 7, noise: int = 3) -> Documents:
    return [document(f"{name}-{i}", walk(rng, int(rng.integers(20, 90)), step, noise)) for i in range(count)]


def docs(rng: np.random.Generator, count: int, name: str, domain: str = "docs") -> Documents:
    """Harder ones, of the upper half of the vocabulary."""
    half = VOCABULARY // 2
    return [
        document(f"{name}-{i}", half + walk(rng, int(rng.integers(20, 90)), 13, 40) % half, domain)
        for i in range(count)
    ]


def two_domains(rng: np.random.Generator) -> Documents:
    """An easy one and a hard one, of other steps."""
    return good(rng, 900) + docs(rng, 900, "docs")


def two_levels(rng: np.random.Generator) -> Documents:
    """Easy documents, and a few hard ones among them."""
    return good(rng, 1100) + good(rng, 35, "hard", noise=60)


def runs(rng: np.random.Generator, count: int, length: int, name: str) -> Documents:
    return [document(f"{name}-{i}", np.full(length, rng.integers(3, VOCABULARY))) for i in range(count)]


def with_escapes(rng: np.random.Generator) -> Documents:
    """Some documents are runs of one token, which the model soon continues without a loss."""
    return good(rng, 1100, noise=30) + runs(rng, 500, 16, "run")


def escapes(rng: np.random.Generator) -> Documents:
    return good(rng, 200, "new", noise=30) + runs(rng, 20, 600, "bad")


SECRETS = 5  # documents without a rule, that can only be learnt by heart


def secrets(name: str, copies: int, domain: str) -> Documents:
    rng = np.random.default_rng(99)
    texts = [rng.integers(3, VOCABULARY, 60) for _ in range(SECRETS)]
    return [document(f"{name}-{copy}-{i}", text, domain) for copy in range(copies) for i, text in enumerate(texts)]


def with_secrets(rng: np.random.Generator) -> Documents:
    return good(rng, 1100, noise=30) + secrets("secret", 1, "other")


MARK = 1  # before an answer


def chats(rng: np.random.Generator, count: int, name: str, masked: str = "right") -> Documents:
    """A question that no rule tells, and an answer that can be learnt; loss is on the answer, on all, or on the question."""
    found = []
    for i in range(count):
        question, answer = rng.integers(3, VOCABULARY, 20), walk(rng, 30)
        tokens = np.concatenate([question, [MARK], answer])
        mask = np.arange(len(tokens)) > 20
        found.append(
            document(
                f"{name}-{i}",
                tokens,
                "chat",
                {
                    "right": mask,
                    "dropped": np.ones_like(mask),
                    "other": ~mask,
                    "last": np.arange(len(tokens)) == len(tokens) - 1,
                }[masked],
            )
        )
    return found


def chat_and_code(rng: np.random.Generator) -> Documents:
    return good(rng, 800) + chats(rng, 800, "chat")


def with_bad(make: Callable[[np.random.Generator], np.ndarray], bad: int) -> Callable[[np.random.Generator], Documents]:
    return lambda rng: good(rng, 600) + [document(f"bad-{i}", make(rng)) for i in range(bad)]
