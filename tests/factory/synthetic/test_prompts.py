"""Files of prompts: every bad line is named; a text file has one prompt on each line."""

from __future__ import annotations

from pathlib import Path

import pytest

from factory.core.errors import InputError
from factory.synthetic.prompts import read_prompts
from tests.support.messages import codes, refused


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nothing", "line 2: Expecting value"),
        ("[1]", "line 2: expected an object, got list"),
        ('{"text": "x"}', "line 2: exactly one of 'prompt' and 'messages' is needed"),
        ('{"prompt": "x", "messages": []}', "line 2: exactly one of"),
        ('{"prompt": 7}', "line 2: 'prompt' is not a text"),
        ('{"prompt": " "}', "line 2: 'prompt' is not a text"),
        ('{"prompt": "x", "domain": "No Such"}', "line 2: 'domain' 'No Such'"),
        ('{"prompt": "x", "license": 3}', "line 2: 'license' is not a string"),
        ('{"messages": []}', "line 2: 'messages' is not a list of messages"),
        ('{"messages": [{"role": "boss", "content": "x"}]}', "message 0: the role 'boss' is not one of"),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}',
            "ends with an answer",
        ),
        ('{"prompt": "\\ud800"}', "line 2: the row contains half"),
    ],
)
def test_a_bad_prompt_is_named_by_its_line(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "One"}\n' + line + "\n")
    with refused("synthetic.bad_line", InputError, path=path, line=2) as caught:
        read_prompts(path, "text", None)
    assert message in str(caught.value)
    assert len(read_prompts(path, "text", 1)) == 1  # what is not asked for is not read


def test_text_files_hold_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"One\n\n Two {\r\nthree")
    assert [prompt.content["text"] for prompt in read_prompts(path, "text", None)] == ["One", " Two {", "three"]
    path.write_bytes(b"\n \n")
    with refused("synthetic.no_prompts", InputError, path=path):
        read_prompts(path, "text", None)


def test_the_tools_of_a_prompt_are_in_its_system_turn_as_in_training(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "Weather?"}], "tools": [{"name": "weather"}]}\n')
    (prompt,) = read_prompts(path, "text", None)
    system, asked = prompt.content["messages"]
    assert system["role"] == "system" and asked["content"] == "Weather?"
    assert '{"type": "function", "function": {"name": "weather"}}' in system["content"].split("\n")
    path.write_text('{"messages": [{"role": "user", "content": "Weather?"}], "tools": ["weather"]}\n')
    with refused("synthetic.bad_line", InputError, line=1) as caught:
        read_prompts(path, "text", None)
    assert codes([caught.value.data["why"]]) == ["shapes.text_not_json"]
