"""Extracts the code between the fences of a reply."""

from __future__ import annotations

import re
import textwrap

_OPENS = re.compile(r"^[ \t]*(?:[-*+>]\s+)?(`{3,}|~{3,})[ \t]*([^`]*)$")


def extract_fenced_code(text: str, defined_name: str = "") -> str | None:
    """Return the code in a reply's fences of backticks or tildes (CommonMark, §4.5); None if the reply has no fence.

    If there are several fences, the first one that defines ``defined_name`` is used, else the first one for Python or without a language, else
    the first one. An unclosed fence holds the rest of the text. Fences may be indented or follow a list's mark; their code is moved to the margin.

    >>> extract_fenced_code("So:\\n```python3\\nx = 1\\n```\\nThat sets it."), extract_fenced_code("~~~\\nx = 1\\n~~~"), extract_fenced_code("x = 1")
    ('x = 1\\n', 'x = 1\\n', None)
    """
    blocks: list[tuple[str, str]] = []  # (language, code)
    mark, language, held = "", "", [""]
    for line in re.split(r"\r\n|\n|\r", text):
        if not mark:
            if found := _OPENS.match(line):
                mark, language, held = found[1], found[2].strip().casefold(), []
        elif re.fullmatch(rf"[ \t]*{re.escape(mark[0])}{{{len(mark)},}}[ \t]*", line):
            blocks.append((language, _code(held)))
            mark = ""
        else:
            held.append(line)
    if mark:
        blocks.append((language, _code(held)))
    if not blocks:
        return None
    if defined_name:
        name = re.compile(
            rf"^(?:(?:async\s+)?def|class)\s+{re.escape(defined_name)}\b|^{re.escape(defined_name)}\s*=", re.MULTILINE
        )
        for _, code in blocks:
            if name.search(code):
                return code
    return next((code for language, code in blocks if re.match(r"\{?\.?(?:i?python|py|$)", language)), blocks[0][1])


def _code(lines: list[str]) -> str:
    return textwrap.dedent("".join(f"{line}\n" for line in lines))
