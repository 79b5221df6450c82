"""Odd chats: empty and blank contents, scripts, invisible characters, code, long turns, roles in odd order, tool calls; the same every time."""

from __future__ import annotations

import random
from typing import Any

CONTENTS = (
    "", " ", "\n\n", "  two blanks", "one at the end ", "\n\tindented\n\n", "a\r\nb\r\n", "Hello, world!", "naïve café cafe\u0301 Ωμέγα ﬁ ½ x²",
    "日本語の文章です。中文，한국어 ไทย", "שלום עולם \u202bמימין\u202c", "مرحبا بالعالم", "👩‍👩‍👧 ☃\ufe0f 🙂🙃", 
    "zero\u200bwidth\u2060 and\u00a0nbsp\u2003em\u2028line",
    "def f(x):\n    return x  # twice\n\n\n\tdone", "```python\nprint('hi')\n```", "12345 + 678 = 13023 v1.0.3", 
    "I'll say it's DON'T, they've; we'RE",
    "{\"a\": [1, 2.5, null]}", "<b>bold</b> & </think> <think>", "ends with <", "> begins", "[INST] not a token [/INST]", "role: user\n\nuser\n",
    "x", ".", "\\n \\t {{ braces }} {% raw %}", "trailing tab\t", "\u0301combining first", "A" * 300, "word " * 200,
    "<tool_call> as text </tool_call>",
    "\x0b\x0c\x1c odd blanks \x1f", "tab\tseparated\tvalues", "'quoted' \"twice\" `code`", "https://a.b/c?d=e_f&g=--h!!!",
)  # fmt: skip
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"town": "Zürich\n", "days": [1, 2.5, None]}},
}


def make_odd_chats(count: int = 500, spelled: tuple[str, ...] = (), tools: bool = True) -> list[list[dict[str, Any]]]:
    """Return chats of every shape. ``spelled``: special tokens that some contents spell. ``tools``: whether there are tool turns and calls."""
    draw = random.Random(31)
    contents = [*CONTENTS, *(f"a {token} b{token}\n" for token in spelled), *spelled]
    chats = []
    for number in range(count):
        content = lambda: " ".join(draw.choices(contents, k=draw.choice((1, 1, 1, 2, 3))))
        turns = draw.randint(1, 3)
        chat: list[dict[str, Any]] = []
        if draw.random() < 0.3:
            chat.append({"role": "system", "content": content()})
        for turn in range(turns):
            chat.append({"role": "user", "content": content()})
            if turn < turns - 1 or draw.random() < 0.8:
                chat.append({"role": "assistant", "content": content()})
        kind = number % 10
        if kind == 1:
            chat.append({"role": "assistant", "content": content()})  # two answers in a row
        if kind == 2:
            chat.insert(draw.randrange(len(chat) + 1), {"role": "system", "content": content()})
        if kind == 3 and tools:
            chat += [
                {
                    "role": "assistant",
                    "content": draw.choice(("", "One moment.")),
                    "tool_calls": [CALL] * draw.randint(1, 2),
                },
                {"role": "tool", "content": content(), "tool_call_id": "c1"},
                {"role": "assistant", "content": content()},
            ]
        if kind == 4:
            chat = [
                message | {"weight": 0} if message["role"] == "assistant" and draw.random() < 0.5 else message
                for message in chat
            ]
        chats.append(chat)
    return chats
