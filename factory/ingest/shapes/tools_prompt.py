"""Defines the text that offers tools to a model in a system turn. Training data and the exported chat template use it."""

from __future__ import annotations

# The text before and after the list of tools. The list has one line for each tool.
TOOLS_HEAD = (
    "# Tools\n\nYou may call functions to help with what is asked. Their signatures are between <tools> and </tools>, one JSON object a "
    "line:\n<tools>"
)
TOOLS_TAIL = (
    "\n</tools>\n\nTo call a function, write a JSON object with its name and its arguments between <tool_call> and </tool_call>:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <object-of-arguments>}\n</tool_call>'
)
TOOL_KEYS = ("name", "description", "parameters")  # written first, in this order
