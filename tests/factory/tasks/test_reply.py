"""The first answer of a reply counts. Code is taken from the fences of a reply if it has fences."""

from __future__ import annotations

import pytest

from factory.evals.reply_code import extract_fenced_code
from factory.evals.tasks import has_valid_python
from factory.tasks.exact_answer import extract_answer
from factory.tasks.reply import choose_default_stop_texts, cut_after_first_answer, extract_program
from factory.tasks.task_file import TaskFile

PROBLEM = "Problem: {question}\nSolution:"


@pytest.mark.parametrize(
    ("prompt", "stops"),
    [
        ("", ("Question:",)), (PROBLEM, ("Problem:",)), ("Problem:\n{question}\n\nSolution:", ("Problem:",)), ("Q: {question}\nA:", ("\nQ:",)),
        ("Solve it.\n\nTask: {question}\nAnswer:", ("Task:",)), ("{question}\nAnswer:", ()), ("{question}", ()), ("## {question}", ()),
        ("### Exercise {question}\n", ("\n### Exercise",)),
    ],
)  # fmt: skip
def test_the_default_stop_texts_follow_from_the_prompt_template(prompt: str, stops: tuple[str, ...]) -> None:
    assert TaskFile(kind="maths", items="x.jsonl", prompt=prompt).stop_texts == stops
    assert TaskFile(kind="maths", items="x.jsonl", prompt=prompt, stop=["."]).stop_texts == (".",)
    assert choose_default_stop_texts("Problem: {question}") == ("Problem:",)


@pytest.mark.parametrize(
    ("template", "reply", "answer"),
    [
        (PROBLEM, "#### 5\n\nProblem: 3+4?\n#### 7", "5"),
        (PROBLEM, "2 + 3 is 5.\nProblem: 3+4?\nSolution: 7", "5"),
        (PROBLEM, "Problem: 2+3?\nSolution: 5", "5"),
        (PROBLEM, "#### 5", "5"),
        ("Question: {question}\nAnswer:", "#### 5\n\nQuestion: 3+4?\nAnswer: #### 7", "5"),
        ("Q: {question}\nA:", "It is 5.\n\nQ: 3+4?\nA: 7", "It is 5."),
        ("Q: {question}\nA:", "By the FAQ: it is\n7", "7"),
        ("{question}\nAnswer:", "We add.\n\nIt is 5.\n\nWhat is 3+4?\nAnswer: 7", "5."),
        ("{question}", "It is 5.\n\nIt is 7.", "7"),
    ],
)
def test_a_reply_is_cut_before_a_next_question_that_the_model_asks_itself(
    template: str, reply: str, answer: str
) -> None:
    assert (extract_answer(cut_after_first_answer(reply, template)) or "").rstrip(".") == answer.rstrip(".")


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("```python3\nx = 1\n```\nThat sets it.", "x = 1\n"),
        ("Do so:\n\n1. This:\n   ```python\n   x = 1\n   ```\nThat sets it.", "x = 1\n"),
        ("    ```py\n    x = 1\n    ```", "x = 1\n"),
        ("~~~\nx = 1\n~~~\nThat sets it.", "x = 1\n"),
        ("~~~~python\nx = '''\n~~~\n'''\n~~~~", "x = '''\n~~~\n'''\n"),
        ("```python\r\nx = 1\r\n```\r\nThat sets it.\r\n", "x = 1\n"),
        ("``` python title=\"x.py\"\nx = 1\n```", "x = 1\n"),
        ("```{.python .numberLines}\nx = 1\n```", "x = 1\n"),
        ("```bash\npip install x\n```\n```python\nx = 1\n```\n```\ny = 2\n```", "x = 1\n"),
        ("```python\nx = 1", "x = 1\n"),
        ("```python\nx = 1\n  y\n```", "x = 1\n  y\n"),
        ("```js\nlet x\n```", "let x\n"),
        ("x = 1", None),
        ("use `x = 1` or ```x = 1```", None),
        ("", None),
    ],
)  # fmt: skip
def test_code_is_extracted_from_the_fences_of_a_reply(reply: str, code: str | None) -> None:
    assert extract_fenced_code(reply) == code


def test_of_several_fences_the_first_that_defines_the_function_is_extracted() -> None:
    reply = "```python\nimport math\n```\nNow:\n```python\ndef f(x):\n    return x\n```\nUse it:\n```python\nprint(f(1))\n```"
    assert (
        extract_fenced_code(reply, "f") == "def f(x):\n    return x\n"
        and extract_fenced_code(reply, "g") == "import math\n"
    )
    assert has_valid_python("```python3\nx = 1\n```\nThat sets it.") and not has_valid_python(
        "```python3\nx = = 1\n```\nx = 1"
    )


@pytest.mark.parametrize(
    ("prompt", "reply"),
    [
        ("def f(x):\n", "    return x + 1\n"),
        ("def f(x):\n    '''Adds one.'''\n", "    return x + 1\n\nif 1:\n    pass\n"),
        (
            "import math\n\ndef f(x):\n    '''Adds one.'''\n",
            "```python\ndef f(x):\n    return x + math.floor(1.5)\n```\nThat adds one.",
        ),
        ("def g():\n    return 1\n\ndef f(x):\n", "So:\n~~~\ndef f(x):\n    return x + g()\n~~~"),
        ("", "Here:\n```python\ndef f(x):\n    return x + 1\n```\nand `f(1)` is 2."),
        ("def f(x):\n", "    '''\n    ```python\n    f(1)\n    ```\n    '''\n    return x + 1\n"),
    ],
)
def test_a_program_is_the_continued_prompt_or_the_code_in_the_fence(prompt: str, reply: str) -> None:
    run: dict[str, object] = {}
    exec(extract_program(prompt, reply), run)
    assert run["f"](1) == 2  # type: ignore[operator]
