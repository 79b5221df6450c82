"""GSM8K and MATH: questions with a worked answer."""

from __future__ import annotations

from typing import Any

from factory.tasks.published.form import Benchmark, Form


class Gsm8k(Form):
    """``test.jsonl`` of OpenAI's repository, and the Parquet files of ``openai/gsm8k``: the answer's number stands after ``####``."""

    question: str
    answer: str

    def fits(self) -> bool:
        return "####" in self.answer

    def item(self, number: int, about: str) -> dict[str, Any]:
        if not self.fits():
            raise ValueError("its answer has no ####")
        return {"id": number, "question": self.question, "answer": self.answer}


class HendrycksMath(Form):
    """The JSON files of Hendrycks et al. (2021), and tables of the same fields: the solution holds the answer in its last ``\\boxed``."""

    problem: str
    level: str | int
    solution: str
    unique_id: str = ""

    def fits(self) -> bool:
        return "\\boxed" in self.solution or "\\fbox" in self.solution

    def item(self, number: int, about: str) -> dict[str, Any]:
        if not self.fits():
            raise ValueError("its solution has no \\boxed answer")
        return {"id": self.unique_id or number, "question": self.problem, "answer": self.solution}


WORKED = (
    Benchmark("gsm8k", "maths", (Gsm8k,)),  # lm-eval: gsm8k/gsm8k.yaml; our default prompt is its own
    Benchmark(
        "math",  # lm-eval: minerva_math/utils.py (Lewkowycz et al. 2022)
        "maths",
        (HendrycksMath,),
        {"prompt": "Problem:\n{question}\n\nSolution:", "stop": ["Problem:"]},
    ),
)
