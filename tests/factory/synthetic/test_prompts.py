"""Files of prompts: every bad line is named; a text file has one prompt on each line."""

from __future__ import annotations

from pathlib import Path

import pytest

from factory.core.errors import InputError
from factory.synthetic.prompts import read_prompts
from tests.support.messages import codes, refused


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("nothing", "ingest.bad_json"),
        ("[1]", "shapes.not_an_object"),
        ('{"text": "x"}', "synthetic.one_prompt"),
        ('{"prompt": "x", "messages": []}', "synthetic.one_prompt"),
        ('{"prompt": 7}', "synthetic.blank_prompt"),
        ('{"prompt": " "}', "synthetic.blank_prompt"),
        ('{"prompt": "x", "domain": "No Such"}', "ingest.row_domain"),
        ('{"prompt": "x", "license": 3}', "ingest.row_name"),
        ('{"messages": []}', "shapes.messages_type"),
        ('{"messages": [{"role": "boss", "content": "x"}]}', "shapes.role"),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}',
            "synthetic.answered",
        ),
        ('{"prompt": "\\ud800"}', "ingest.surrogate"),
    ],
)
def test_the_error_for_a_bad_prompt_names_its_line(line: str, code: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "One"}\n' + line + "\n")
    with refused("synthetic.bad_line", InputError, path=path, line=2) as caught:
        read_prompts(path, "text", None)
    assert codes([caught.value.data["why"]]) == [code]
    assert len(read_prompts(path, "text", 1)) == 1  # later lines are not read


def test_each_line_of_a_text_file_is_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"One\n\n Two {\r\nthree")
    assert [prompt.content["text"] for prompt in read_prompts(path, "text", None)] == ["One", " Two {", "three"]
    path.write_bytes(b"\n \n")
    with refused("synthetic.no_prompts", InputError, path=path):
        read_prompts(path, "text", None)


def test_the_system_turn_of_a_prompt_lists_its_tools_as_in_training(tmp_path: Path) -> None:
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
