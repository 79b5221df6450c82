"""Cuts a model's reply before a next question that the model asks itself, and extracts code from a reply with fences."""

from __future__ import annotations

import ast
import re
import warnings

from factory.evals.reply_code import extract_fenced_code


def choose_default_stop_texts(template: str) -> tuple[str, ...]:
    """The default stop texts: the words before the question in the prompt's template. Empty if there are no such words.

    >>> (choose_default_stop_texts("Problem: {question}\\nSolution:"),
    ...  choose_default_stop_texts("Solve it.\\nQ: {question}\\nA:"),
    ...  choose_default_stop_texts("{question}\\nAnswer:"))
    (('Problem:',), ('\\nQ:',), ())
    """
    before, _, _ = template.partition("{question}")
    last = before.strip().rsplit("\n", 1)[-1].strip()
    if not re.search(r"\w", last):
        return ()
    # A word with a colon does not occur inside a sentence. Any other text ends a reply only at the beginning of a line.
    return (last,) if re.fullmatch(r"\w{4,}:", last) else (f"\n{last}",)


def cut_after_first_answer(text: str, template: str) -> str:
    """A reply, cut where the prompt's template begins again.

    >>> cut_after_first_answer("#### 5\\n\\nProblem: 3+4?\\n#### 7", "Problem: {question}\\nSolution:")
    '#### 5'
    >>> cut_after_first_answer("It is 5.\\n\\nWhat is 3 + 4?\\nAnswer: 7", "{question}\\nAnswer:")
    'It is 5.'
    """
    before, _, after = template.partition("{question}")
    first = before.strip().rsplit("\n", 1)[-1].strip()
    mark = after.strip().split("\n", 1)[0].strip()
    if re.search(r"\w", first):
        wherever = "" if re.fullmatch(r"\w{4,}:", first) else r"\n[ \t]*"
        again = re.compile(wherever + re.escape(first))
    elif re.search(
        r"\w", mark
    ):  # no text before the question: find the paragraph that ends with the text after the question
        again = re.compile(rf"\n[ \t]*\n(?:(?!\n[ \t]*\n).)*?\n?{re.escape(mark)}", re.DOTALL)
    else:
        return text
    for found in again.finditer(text):
        if text[: found.start()].strip():  # a reply may begin by repeating the question
            return text[: found.start()].rstrip()
    return text


def extract_program(prompt: str, text: str) -> str:
    """The program of a code item: the prompt and a reply that continues it, or the code in the reply's fences.

    Of several fences, the first that defines the prompt's last function or class counts, else the first for Python. If prompt and reply together are
    valid Python, fences are ignored, because a docstring may hold fences.

    >>> extract_program("import math\\ndef f():\\n", "```python\\ndef f():\\n    return 1\\n```\\nDone.")
    'import math\\n\\ndef f():\\n    return 1\\n'
    >>> extract_program("def f():\\n", "    return 1")
    'def f():\\n    return 1'
    """
    defined = list(re.finditer(r"^(?:async\s+)?(?:def|class)\s+(\w+)", prompt, re.MULTILINE))
    entry_point = defined[-1][1] if defined else ""
    if (code := extract_fenced_code(text, entry_point)) is None or _is_python(prompt + text):
        return prompt + text
    if entry_point and re.search(rf"^(?:async\s+)?(?:def|class)\s+{re.escape(entry_point)}\b", code, re.MULTILINE):
        head = next((prompt[: one.start()] for one in defined if one[1] == entry_point), prompt)
        return f"{head}\n{code}" if head else code
    return prompt + code


def _is_python(program: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):  # of the program's own escapes
            ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
