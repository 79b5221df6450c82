"""Each shape's row, and the document that it must be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factory.ingest.document import BadRow, content_sha256, normalise, parse_document, parse_json
from factory.ingest.shapes.chats import MEANINGFUL, Notes
from factory.ingest.shapes.mapping import FieldMapping

ASKED, SAID = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
SILENT = SAID | {"weight": 0}
SYSTEM = {"role": "system", "content": "Be short."}
CHAT = [ASKED, SAID]
NO, RESULT = SAID | {"content": "No."}, {"role": "tool", "content": "3"}
PARTS = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]


def of(row: Any, **mapping: Any) -> tuple[Any, Notes]:
    """The words of the document that a row is, and what was noted."""
    notes = Notes()
    parsed = parse_document(row, "text", FieldMapping(files="*", **mapping) if mapping else None, notes)
    return parsed.content.get("messages", parsed.content.get("text")), notes


def user(words: str) -> dict[str, str]:
    return ASKED | {"content": words}


def bad(row: Any, **mapping: Any) -> str:
    with pytest.raises(BadRow) as caught:
        of(row, **mapping)
    return str(caught.value)


SHAREGPT = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
SHAPES: list[tuple[str, dict[str, Any], Any, str]] = [
    ("text", {"text": "a"}, "a", ""),
    ("messages", {"messages": CHAT}, CHAT, ""),
    ("sharegpt", {"conversations": SHAREGPT}, CHAT, "read as ShareGPT: conversations → messages"),
    ("sharegpt with a system", {"conversations": SHAREGPT, "system": "Be short."}, [SYSTEM, *CHAT], "read as ShareGPT"),
    ("sharegpt's tool", {"conversations": [*SHAREGPT, {"from": "tool", "value": "3"}]}, [*CHAT, RESULT], "read as ShareGPT"),
    ("a chat under that name", {"conversation": CHAT}, CHAT, "read as a chat: conversation → messages"),
    ("alpaca", {"instruction": "Add.", "input": "1, 2", "output": "So."}, [user("Add.\n\n1, 2"), SAID], "read as Alpaca"),
    ("alpaca without input", {"instruction": "Why?", "input": "", "output": "So."}, CHAT, "read as Alpaca"),
    ("alpaca with a history", {"instruction": "And?", "output": "So.", "history": [["Why?", "So."]]}, [*CHAT, user("And?"), SAID], "read as Alpaca"),
    ("dolly", {"instruction": "Why?", "context": "", "response": "So.", "category": "qa"}, CHAT, "read as Dolly"),
    ("developer", {"messages": [SYSTEM | {"role": "developer"}, *CHAT]}, [SYSTEM, *CHAT], "the role 'developer' is read as 'system'"),
    ("anthropic's system", {"system": "Be short.", "messages": CHAT}, [SYSTEM, *CHAT], ""),
    ("parts", {"messages": [ASKED | {"content": PARTS}, SAID]}, CHAT, "content in parts"),
    ("weight 0", {"messages": [ASKED, SILENT, ASKED, SAID | {"weight": 1}]}, [ASKED, SILENT, *CHAT], "answers of weight 0 carry no loss"),
    ("axolotl's training", {"messages": [ASKED, SAID | {"training": False}, *CHAT]}, [ASKED, SILENT, *CHAT], "answers of weight 0 carry no loss"),
    ("nothing is called", {"messages": [ASKED | {"name": ""}, SAID | {"tool_calls": [], "refusal": None}], "tools": "[]"}, CHAT, ""),
    ("prompt and completion", {"prompt": "Why?", "completion": "So."}, CHAT, "read as prompt and completion"),
    ("of messages", {"prompt": [ASKED, SAID, ASKED], "completion": [SAID]}, [ASKED, SILENT, ASKED, SAID], "read as prompt and completion"),
    ("preference", {"prompt": "Why?", "chosen": "So.", "rejected": "No."}, CHAT, "the rejected one is not trained on"),
    ("of whole chats", {"chosen": [*CHAT, *CHAT], "rejected": [*CHAT, ASKED, NO]}, [ASKED, SILENT, *CHAT], "read as preference pairs"),
    ("with the prompt in it", {"prompt": "Why?", "chosen": CHAT, "rejected": [ASKED, SAID | {"content": "No."}]}, CHAT, "read as preference pairs"),
    ("of answers alone", {"prompt": [ASKED], "chosen": [SAID], "rejected": [SAID | {"content": "No."}]}, CHAT, "read as preference pairs"),
    ("questions", {"question": "Why?", "answer": "So."}, CHAT, "read as questions and answers"),
    ("content", {"content": "a", "url": "https://example.org"}, "a", "read as text: content → text"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "words", "said"), [case[1:] for case in SHAPES], ids=[case[0] for case in SHAPES])
def test_each_shape_is_that_document_and_is_said(row: dict[str, Any], words: Any, said: str) -> None:
    found, notes = of(json.loads(json.dumps(row)))
    assert found == words
    assert any(said in one for one in notes.said) if said else not notes.said


def test_rows_of_the_contract_keep_their_content_hash() -> None:
    """The hashes are of before there were shapes: an old shard that comes again is a copy."""
    for row, sha256 in (
        ({"text": "Once\r\nupon  \u0065\u0301", "score": 1}, "d2efe400"),
        ({"messages": [SYSTEM, ASKED, SAID], "lang": "en"}, "69c275be"),
    ):
        content = normalise(parse_document(row, "text").content, code=False)
        assert content_sha256(content)[:8] == sha256


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": CHAT, "documents": [{"title": "a"}]}, "'documents': the chat template has no place for it; 'ignore: [documents]'"),
        ({"messages": [ASKED, SAID | {"refusal": "No.", "audio": {"id": 1}}]}, "'audio', 'refusal': the chat template has no place for them"),
        ({"messages": [ASKED | {"name": "Ann"}, SAID]}, "'name'"),
        ({"messages": [ASKED | {"content": [{"type": "image_url", "image_url": {}}]}, SAID]}, "message 0: a part of its content is 'image_url'"),
        ({"messages": [ASKED | {"content": [{"type": "input_audio"}]}, SAID]}, "'input_audio'"),
        ({"messages": CHAT, "images": ["a.png"]}, "'images'"),
        ({"messages": [ASKED, SAID | {"weight": 0.5}]}, "message 1: 'weight' is 0.5"),
        ({"messages": [ASKED, SAID | {"weight": "0"}]}, "message 1: 'weight' is '0'"),
        ({"messages": [ASKED, SAID | {"training": "no"}]}, "message 1: 'training' is no"),
        ({"messages": [ASKED | {"train": True}, SAID]}, "only the assistant's turns carry loss"),
        ({"messages": [ASKED, SAID | {"weight": 0}]}, "no_supervised: every answer is of weight 0"),
        ({"prompt": "Why?", "completion": "So.", "label": False}, "'label'"),
        ({"prompt": "Why?", "completion": "So.", "label": "False"}, "'label'"),  # as a CSV file has it
        ({"conversations": [{"from": "function_call", "value": "{}"}]}, "message 0: 'function_call': a call names no function"),
        ({"prompt": "Why?", "completion": "So.", "label": 0}, "'label': the chat template has no place for it; 'ignore: [label]'"),
        ({"prompt": [ASKED], "completion": [SAID], "label": "0"}, "'label'"),
        ({"chosen": "\n\nHuman: Why?\n\nAssistant: So.", "rejected": "x"}, "without a 'prompt'"),
        ({"prompt": "Why?", "chosen": [ASKED | {"content": "Who?"}, SAID], "rejected": []}, "in which 'prompt' does not occur"),
        ({"system": "Be long.", "messages": [SYSTEM, *CHAT]}, "begin with another one"),
        ({"content": "a", "body": "b"}, "'content' and 'body' may both be the text"),
        ({"question": "Why?", "answer": "B", "choices": ["a", "b"]}, "no known shape; columns: question, answer, choices"),
        ({"text": "a", "domain": "My Domain!"}, "letters a-z, digits"),
        ({"text": "a", "domain": "cloze"}, "write 'cloze-text'"),
        ({"text": "a", "source": float("nan")}, "'source' is not a string of 1000 characters at most (it is nan)"),
        ({"text": "a", "license": ["MIT", 3]}, "'license' is not a string"),
    ],
)  # fmt: skip
def test_a_meaning_that_has_no_place_costs_its_row_and_is_named(row: dict[str, Any], said: str) -> None:
    assert said in bad(row)


def test_a_label_is_bad_only_beside_prompt_and_completion_and_only_as_false() -> None:
    for label in (1, "1", True, 2):
        assert of({"prompt": "Why?", "completion": "So.", "label": label})[0][1]["content"] == "So."
    assert of({"messages": [ASKED, SAID], "label": 0})[0] == [ASKED, SAID]  # a class of the chat
    assert of({"prompt": "Why?", "completion": "So.", "label": 0}, ignore=["label"])[0][1]["content"] == "So."
    mapped = {"q": "Why?", "a": "So.", "label": 0}
    assert "'label'" in bad(mapped, prompt="q", completion="a")
    assert of(mapped, prompt="q", completion="a", source="label")[0][1]["content"] == "So."


def test_what_a_person_ignores_is_dropped_and_said() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    answer = {"role": "tool", "content": "3", "tool_call_id": "1"}
    row = {"messages": [ASKED, call, answer, SAID], "tools": [{}]}
    words, notes = of(row, ignore=["tools", "tool_calls", "tool_call_id"])
    assert words == [ASKED, {"role": "assistant", "content": "", "weight": 0}, {"role": "tool", "content": "3"}, SAID]
    assert {one.rpartition(" ")[2] for one in notes.said} == {"tools", "tool_calls", "tool_call_id"}
    assert "'tool_call_id'" in bad(row, ignore=["tools", "tool_calls"])


def test_fields_that_nothing_reads_cost_nothing_and_are_named() -> None:
    row = parse_json(
        b'{"text": "a", "score": NaN, "big": ' + b"9" * 10_000 + b', "lang": "en", "none": null, "created": 1e400}'
    )
    words, notes = of(row)
    assert words == "a" and notes.unread == {"score", "big", "lang"}
    _, notes = of({"messages": [ASKED | {"time": 3}, SAID]})
    assert notes.unread == {"messages.time"}


def test_a_number_is_a_source_and_a_list_of_licences_holds_together() -> None:
    notes = Notes()
    parsed = parse_document(
        {"text": "a", "source": 7, "license": ["MIT ", "MIT OR Zlib", "", "MIT "]}, "text", None, notes
    )
    assert (parsed.source, parsed.license) == ("7", "MIT AND (MIT OR Zlib)") and len(notes.said) == 2


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["user", "gpt", "text", "So."]),
)
NAMES = st.sampled_from(
    ["text", "messages", "conversations", "conversation", "from", "value", "role", "content", "weight", "instruction", "input", "output",
     "history", "prompt", "completion", "chosen", "rejected", "question", "answer", "system", "type", "a", "a.b", "0", "tools", "license", "id"]
)  # fmt: skip
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=12
)
PATHS = st.sampled_from(
    ["text", "a", "a.b", "a.0.content", "messages.0", "0", "..", "a..b", "{a} {a.b}", "{text}", "{{{a}}}"]
)


@given(
    st.dictionaries(NAMES, VALUES, max_size=5),
    st.fixed_dictionaries({}, optional=dict.fromkeys(("domain", "source", "license", "id", "url", "system"), PATHS)),
    st.sampled_from([{}, {"text": "a"}, {"text": "{a}: {a.b}"}, {"messages": "a"}, {"messages": "messages"}, {"prompt": "a", "completion": "{a.b}"}]),
    st.lists(st.sampled_from(sorted(MEANINGFUL)), max_size=3),
)  # fmt: skip
@settings(deadline=None, max_examples=150)
def test_any_row_is_a_document_or_a_bad_row(
    row: dict[str, Any], named: dict[str, str], content: dict[str, str], ignore: list[str]
) -> None:
    if "text" in content:
        named.pop("system", None)
    try:
        parsed = parse_document(row, "text", FieldMapping(files="*", ignore=ignore, **named, **content))
    except BadRow as found:
        assert found.rule in {"bad_schema", "bad_encoding", "no_supervised"} and "\n" not in found.detail[:40]
        return
    assert parsed.domain and (isinstance(parsed.content.get("text"), str) or parsed.content["messages"])
