"""A row of each known shape is read as the right document."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factory.ingest.document import BadRow, hash_content, normalise_content, parse_document, parse_json
from factory.ingest.shapes.chats import MEANINGFUL, ReadingNotes
from factory.ingest.shapes.field_mapping import FieldMapping
from tests.support.messages import codes, refused

ASKED, SAID = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
SILENT = SAID | {"weight": 0}
SYSTEM = {"role": "system", "content": "Be short."}
CHAT = [ASKED, SAID]
NO, RESULT = SAID | {"content": "No."}, {"role": "tool", "content": "3"}
PARTS = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]


def of(row: Any, **mapping: Any) -> tuple[Any, ReadingNotes]:
    """(the content of the document that a row is read as, the notes)."""
    notes = ReadingNotes()
    parsed = parse_document(row, "text", FieldMapping(files="*", **mapping) if mapping else None, notes)
    return parsed.content.get("messages", parsed.content.get("text")), notes


def user(words: str) -> dict[str, str]:
    return ASKED | {"content": words}


SHAREGPT = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
SHAPES: list[tuple[str, dict[str, Any], Any, str]] = [
    ("text", {"text": "a"}, "a", ""),
    ("messages", {"messages": CHAT}, CHAT, ""),
    ("sharegpt", {"conversations": SHAREGPT}, CHAT, "shapes.read_conversations"),
    ("sharegpt with a system", {"conversations": SHAREGPT, "system": "Be short."}, [SYSTEM, *CHAT], "shapes.read_conversations"),
    ("sharegpt's tool", {"conversations": [*SHAREGPT, {"from": "tool", "value": "3"}]}, [*CHAT, RESULT], "shapes.read_conversations"),
    ("a chat under that name", {"conversation": CHAT}, CHAT, "shapes.read_conversations"),
    ("alpaca", {"instruction": "Add.", "input": "1, 2", "output": "So."}, [user("Add.\n\n1, 2"), SAID], "shapes.read_instruction"),
    ("alpaca without input", {"instruction": "Why?", "input": "", "output": "So."}, CHAT, "shapes.read_instruction"),
    ("alpaca with a history", {"instruction": "And?", "output": "So.", "history": [["Why?", "So."]]}, [*CHAT, user("And?"), SAID],
     "shapes.read_instruction"),
    ("dolly", {"instruction": "Why?", "context": "", "response": "So.", "category": "qa"}, CHAT, "shapes.read_instruction"),
    ("developer", {"messages": [SYSTEM | {"role": "developer"}, *CHAT]}, [SYSTEM, *CHAT], "shapes.developer"),
    ("anthropic's system", {"system": "Be short.", "messages": CHAT}, [SYSTEM, *CHAT], ""),
    ("parts", {"messages": [ASKED | {"content": PARTS}, SAID]}, CHAT, "shapes.parts_joined"),
    ("weight 0", {"messages": [ASKED, SILENT, ASKED, SAID | {"weight": 1}]}, [ASKED, SILENT, *CHAT], "shapes.weight_0"),
    ("axolotl's training", {"messages": [ASKED, SAID | {"training": False}, *CHAT]}, [ASKED, SILENT, *CHAT], "shapes.weight_0"),
    ("nothing is called", {"messages": [ASKED | {"name": ""}, SAID | {"tool_calls": [], "refusal": None}], "tools": "[]"}, CHAT, ""),
    ("prompt and completion", {"prompt": "Why?", "completion": "So."}, CHAT, "shapes.read_prompts"),
    ("of messages", {"prompt": [ASKED, SAID, ASKED], "completion": [SAID]}, [ASKED, SILENT, ASKED, SAID], "shapes.read_prompts"),
    ("preference", {"prompt": "Why?", "chosen": "So.", "rejected": "No."}, CHAT, "shapes.read_preference"),
    ("of whole chats", {"chosen": [*CHAT, *CHAT], "rejected": [*CHAT, ASKED, NO]}, [ASKED, SILENT, *CHAT], "shapes.read_preference"),
    ("with the prompt in it", {"prompt": "Why?", "chosen": CHAT, "rejected": [ASKED, SAID | {"content": "No."}]}, CHAT, "shapes.read_preference"),
    ("of answers alone", {"prompt": [ASKED], "chosen": [SAID], "rejected": [SAID | {"content": "No."}]}, CHAT, "shapes.read_preference"),
    ("questions", {"question": "Why?", "answer": "So."}, CHAT, "shapes.read_questions"),
    ("content", {"content": "a", "url": "https://example.org"}, "a", "shapes.read_text"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "words", "code"), [case[1:] for case in SHAPES], ids=[case[0] for case in SHAPES])
def test_each_known_shape_is_read_as_its_document_and_reported(row: dict[str, Any], words: Any, code: str) -> None:
    found, notes = of(json.loads(json.dumps(row)))
    assert found == words
    assert code in codes(notes.messages) if code else not notes.messages


def test_rows_in_the_contracts_own_form_keep_their_content_hash() -> None:
    """The hashes are older than the shapes: an old shard that comes again must be a copy."""
    for row, sha256 in (
        ({"text": "Once\r\nupon  \u0065\u0301", "score": 1}, "d2efe400"),
        ({"messages": [SYSTEM, ASKED, SAID], "lang": "en"}, "69c275be"),
    ):
        content = normalise_content(parse_document(row, "text").content, code=False)
        assert hash_content(content)[:8] == sha256


@pytest.mark.parametrize(
    ("row", "code", "data"),
    [
        ({"messages": CHAT, "documents": [{"title": "a"}]}, "shapes.field_not_shown", {"fields": ["documents"]}),
        ({"messages": [ASKED, SAID | {"refusal": "No.", "audio": {"id": 1}}]}, "shapes.field_not_shown", {"fields": ["audio", "refusal"]}),
        ({"messages": [ASKED | {"name": "Ann"}, SAID]}, "shapes.field_not_shown", {"fields": ["name"]}),
        ({"messages": [ASKED | {"content": [{"type": "image_url", "image_url": {}}]}, SAID]}, "shapes.part_type", {"place": 0, "kind": "image_url"}),
        ({"messages": [ASKED | {"content": [{"type": "input_audio"}]}, SAID]}, "shapes.part_type", {"kind": "input_audio"}),
        ({"messages": CHAT, "images": ["a.png"]}, "shapes.field_not_shown", {"fields": ["images"]}),
        ({"messages": [ASKED, SAID | {"weight": 0.5}]}, "shapes.weight", {"place": 1, "weight": "0.5"}),
        ({"messages": [ASKED, SAID | {"weight": "0"}]}, "shapes.weight", {"place": 1, "weight": "'0'"}),
        ({"messages": [ASKED, SAID | {"training": "no"}]}, "shapes.not_a_boolean", {"place": 1, "field": "training", "value": "no"}),
        ({"messages": [ASKED | {"train": True}, SAID]}, "shapes.loss_of_role", {"place": 0, "field": "train"}),
        ({"messages": [ASKED, SAID | {"weight": 0}]}, "shapes.all_weight_0", {}),
        ({"prompt": "Why?", "completion": "So.", "label": False}, "shapes.field_not_shown", {"fields": ["label"]}),
        ({"prompt": "Why?", "completion": "So.", "label": "False"}, "shapes.field_not_shown", {"fields": ["label"]}),  # as a CSV file has it
        ({"conversations": [{"from": "function_call", "value": "{}"}]}, "shapes.unnamed_call", {"where": "message 0: 'function_call'"}),
        ({"prompt": "Why?", "completion": "So.", "label": 0}, "shapes.field_not_shown", {"fields": ["label"]}),
        ({"prompt": [ASKED], "completion": [SAID], "label": "0"}, "shapes.field_not_shown", {"fields": ["label"]}),
        ({"chosen": "\n\nHuman: Why?\n\nAssistant: So.", "rejected": "x"}, "shapes.chosen_without_prompt", {}),
        ({"prompt": "Why?", "chosen": [ASKED | {"content": "Who?"}, SAID], "rejected": []}, "shapes.prompt_not_in_chosen", {}),
        ({"system": "Be long.", "messages": [SYSTEM, *CHAT]}, "shapes.two_system_turns", {}),
        ({"content": "a", "body": "b"}, "shapes.several_texts", {"columns": ["content", "body"], "first": "content"}),
        ({"question": "Why?", "answer": "B", "choices": ["a", "b"]}, "shapes.unknown", {"columns": ["question", "answer", "choices"]}),
        ({"text": "a", "domain": "My Domain!"}, "ingest.row_domain", {"name": "My Domain!"}),
        ({"text": "a", "domain": "cloze"}, "ingest.row_domain", {"name": "cloze"}),
        ({"text": "a", "source": float("nan")}, "ingest.row_name", {"key": "source", "limit": 1000, "value": "it is nan"}),
        ({"text": "a", "license": ["MIT", 3]}, "ingest.row_name", {"key": "license", "value": "it is list"}),
    ],
)  # fmt: skip
def test_a_row_with_a_meaning_that_no_document_can_hold_is_dropped(
    row: dict[str, Any], code: str, data: dict[str, Any]
) -> None:
    with refused(code, BadRow, **data) as caught:
        of(row)
    assert caught.value.rule == ("no_supervised" if code == "shapes.all_weight_0" else "bad_schema")


def test_reserved_domains_and_invalid_characters_have_different_messages() -> None:
    for domain, code in (("My Domain!", "ingest.domain_characters"), ("cloze", "ingest.reserved_domain")):
        with refused("ingest.row_domain", BadRow) as caught:
            of({"text": "a", "domain": domain})
        assert codes([caught.value.data["why"]]) == [code]


def test_a_label_rejects_a_row_only_if_it_is_false_beside_prompt_and_completion() -> None:
    for label in (1, "1", True, 2):
        assert of({"prompt": "Why?", "completion": "So.", "label": label})[0][1]["content"] == "So."
    assert of({"messages": [ASKED, SAID], "label": 0})[0] == [ASKED, SAID]  # a class of the chat
    assert of({"prompt": "Why?", "completion": "So.", "label": 0}, ignore=["label"])[0][1]["content"] == "So."
    mapped = {"q": "Why?", "a": "So.", "label": 0}
    with refused("shapes.field_not_shown", fields=["label"]):
        of(mapped, prompt="q", completion="a")
    assert of(mapped, prompt="q", completion="a", source="label")[0][1]["content"] == "So."


def test_ignored_fields_are_dropped_and_reported() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    answer = {"role": "tool", "content": "3", "tool_call_id": "1"}
    row = {"messages": [ASKED, call, answer, SAID], "tools": [{}]}
    words, notes = of(row, ignore=["tools", "tool_calls", "tool_call_id"])
    assert words == [ASKED, {"role": "assistant", "content": "", "weight": 0}, {"role": "tool", "content": "3"}, SAID]
    assert codes(notes.messages) == ["shapes.ignored"] * 3
    assert {one.data["name"] for one in notes.messages} == {"tools", "tool_calls", "tool_call_id"}
    with refused("shapes.field_not_shown", fields=["tool_call_id"]):
        of(row, ignore=["tools", "tool_calls"])


def test_unread_fields_do_not_drop_the_row_and_are_named() -> None:
    row = parse_json(
        b'{"text": "a", "score": NaN, "big": ' + b"9" * 10_000 + b', "lang": "en", "none": null, "created": 1e400}'
    )
    words, notes = of(row)
    assert words == "a" and notes.unread_fields == {"score", "big", "lang"}
    _, notes = of({"messages": [ASKED | {"time": 3}, SAID]})
    assert notes.unread_fields == {"messages.time"}


def test_a_number_can_be_a_source_and_a_list_of_licences_becomes_one() -> None:
    notes = ReadingNotes()
    parsed = parse_document(
        {"text": "a", "source": 7, "license": ["MIT ", "MIT OR Zlib", "", "MIT "]}, "text", None, notes
    )
    assert (parsed.source, parsed.license) == ("7", "MIT AND (MIT OR Zlib)") and len(notes.messages) == 2


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
