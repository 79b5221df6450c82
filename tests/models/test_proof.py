"""Every family's adapter against transformers: the checks of ``tests.support.models.proof`` on each small model, and the table that shows them."""

from __future__ import annotations

import pytest

from models.adapters import FAMILIES
from tests.support.models.proof import CHECKS, measure, read_table
from tests.support.models.small_models import CASES, Case

SERVED = "served"  # starts two processes for each model


@pytest.mark.sample(
    "llama-scaled", "qwen2-windows", "qwen3-windows", "qwen3_moe-plain", "smollm3-plain", "olmo2-tied", "mistral-windows", "gemma2-plain",
    "gemma3_text-scaled", "glm4_moe-plain", "deepseek_v3-plain", "olmo3-windows", "exaone4-windows", "seed_oss-biases", "mixtral-windows",
    "olmoe-plain", "nanochat-biases", "phi3-windows", "gpt_oss-plain",
)  # fmt: skip
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_family_computes_what_transformers_computes(case: Case) -> None:
    numbers = measure(case, [name for name in CHECKS if name != SERVED])
    assert {name: number for name, number in numbers.items() if not number <= CHECKS[name].bound} == {}


@pytest.mark.sample("llama-scaled", "gemma3_text-scaled", "deepseek_v3-plain")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_factory_serve_answers_with_the_tokens_of_transformers(case: Case) -> None:
    assert measure(case, [SERVED]) == {SERVED: 0}


def test_the_page_shows_every_check_of_every_model_within_its_bound() -> None:
    """After a change: ``python -m tests.support.models.proof --write``."""
    table = read_table()
    assert list(table) == [str(case) for case in CASES]
    for name, numbers in table.items():
        assert all(number <= CHECKS[check].bound for check, number in numbers.items()), name


def test_every_family_is_proved_with_two_models_at_least() -> None:
    cases = [case.family for case in CASES]
    assert {family: cases.count(family) for family in FAMILIES if cases.count(family) < 2} == {}
