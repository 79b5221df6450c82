"""Tools, calls and reasoning: ingest, and transformers with the exported template, encode the same messages as the same ids."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factory.core.workspace import Workspace
from factory.evals.contamination import check_contamination
from factory.evals.policy import EvalPolicy
from factory.ingest.chain import ShardReport
from factory.ingest.chat_template import TEMPLATE_WITHOUT_CALLS, put_blanks_in_special_tokens
from factory.ingest.document import BadRow, normalise_content, parse_document
from factory.ingest.shapes.chats import ReadingNotes
from factory.ingest.shapes.field_mapping import FieldMapping
from factory.ingest.tokenizer import SPECIAL, Tokenizer, has_template_with_tool_calls
from factory.ledger.ledger import Ledger
from tests.support.factory.made_up_text import prose
from tests.support.messages import codes, refused
from trainer.contract.data.token_shard import TokenShard

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a town, naïve ☃",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"town":"Zürich"}'}}
OTHER = CALL | {"id": "c2", "function": {"name": "get_weather", "arguments": '{"town": "Bern", "at": 1.50}'}}
ASKED = {"role": "user", "content": "Weather?"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL, OTHER]}
RESULTS = [{"role": "tool", "tool_call_id": f"c{n}", "content": '{"sky": "clear"}'} for n in (1, 2)]
SAID = {"role": "assistant", "content": "Clear."}
CALLED = '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Zürich"}}\n</tool_call>'
CALLED_TOO = '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Bern", "at": 1.5}}\n</tool_call>'
SYSTEM = {"role": "system", "content": "Be short."}
OLDER = {"role": "assistant", "content": None, "function_call": CALL["function"]}
THINKS = CALLS | {"reasoning_content": "Hm.", "tool_calls": [CALL]}
THOUGHT = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
ZURICH = json.dumps({"name": "get_weather", "arguments": {"town": "Zürich"}})
HERMES_SYSTEM = f"You may call these: <tools> [{json.dumps(WEATHER)}] </tools>"


def turns_of(row: Any, ignore: tuple[str, ...] = (), plain: bool = False) -> tuple[list[dict[str, Any]], ReadingNotes]:
    notes = ReadingNotes(plain)
    mapping = FieldMapping(files="*", ignore=list(ignore)) if ignore else None
    parsed = parse_document(json.loads(json.dumps(row)), "text", mapping, notes)
    return normalise_content(parsed.content, code=False)["messages"], notes


def decoded(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with arguments as objects, as vLLM passes them to the template and as transformers' documentation asks."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        older = [message["function_call"]] if "function_call" in message else []
        for call in [*message.get("tool_calls", []), *older]:
            function = call.get("function", call)
            function["arguments"] = json.loads(function["arguments"])
    return messages


def served(hf: Any, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
    return list(hf.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True)["input_ids"])


ROWS: list[tuple[str, dict[str, Any], list[dict[str, Any]], list[Any] | None, str]] = [
    # what it is, the row, the messages and the tools that a client sends a server, all that carries loss
    (
        "OpenAI's fine-tuning",
        {"messages": [ASKED, CALLS, *RESULTS, SAID], "tools": [WEATHER], "parallel_tool_calls": True},
        decoded([ASKED, CALLS, *RESULTS, SAID]), [WEATHER], f"{CALLED}\n{CALLED_TOO}Clear.",
    ),
    (
        "with a system message and content beside the call",
        {"messages": [SYSTEM, ASKED, CALLS | {"content": "Let me see."}, *RESULTS, SAID], "tools": [WEATHER]},
        decoded([SYSTEM, ASKED, CALLS | {"content": "Let me see."}, *RESULTS, SAID]), [WEATHER],
        f"Let me see.\n{CALLED}\n{CALLED_TOO}Clear.",
    ),
    (
        "a call of weight 0",
        {"messages": [ASKED, CALLS | {"weight": 0}, *RESULTS, SAID], "tools": json.dumps([WEATHER])},
        decoded([ASKED, CALLS, *RESULTS, SAID]), [WEATHER], "Clear.",
    ),
    (
        "OpenAI's older functions",
        {"messages": [ASKED, OLDER, {"role": "function", "name": "get_weather", "content": "3"}, SAID], "functions": [WEATHER["function"]]},
        decoded([ASKED, OLDER, {"role": "tool", "content": "3"}, SAID]),
        [WEATHER["function"]], f"{CALLED}Clear.",
    ),
    (
        "ShareGPT with function_call",
        {"conversations": [{"from": "human", "value": "Weather?"}, {"from": "function_call", "value": ZURICH},
                           {"from": "observation", "value": "3"}, {"from": "gpt", "value": "Clear."}],
         "system": "Be short.", "tools": json.dumps([WEATHER["function"]])},
        decoded([SYSTEM, ASKED, CALLS | {"content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}, SAID]),
        [WEATHER], f"{CALLED}Clear.",
    ),
    (
        "Hermes' function calling",
        {"conversations": [{"from": "system", "value": HERMES_SYSTEM}, {"from": "human", "value": "Weather?"}, {"from": "gpt", "value": CALLED},
                           {"from": "tool", "value": "<tool_response>\n3\n</tool_response>"}, {"from": "gpt", "value": "Clear."}],
         "tools": json.dumps([WEATHER])},
        [{"role": "system", "content": HERMES_SYSTEM}, ASKED, {"role": "assistant", "content": CALLED},
         {"role": "tool", "content": "<tool_response>\n3\n</tool_response>"}, SAID], None, f"{CALLED}Clear.",
    ),
    (
        "reasoning, as DeepSeek and Qwen name it",
        {"messages": [ASKED, SAID | {"reasoning_content": "\nHm.\n"}, ASKED, SAID | {"reasoning": "Hm?"}, ASKED, SAID | {"thinking": "So."}]},
        [ASKED, SAID | {"reasoning_content": "\nHm.\n"}, ASKED, SAID | {"reasoning": "Hm?"}, ASKED, SAID | {"thinking": "So."}], None,
        "<think>\nHm.\n</think>\n\nClear.<think>\nHm?\n</think>\n\nClear.<think>\nSo.\n</think>\n\nClear.",
    ),
    (
        "reasoning before a call, and alone",
        {"messages": [ASKED, THINKS, RESULTS[0], THOUGHT], "tools": [WEATHER]},
        decoded([ASKED, THINKS, RESULTS[0], THOUGHT | {"content": None}]),
        [WEATHER], f"<think>\nHm.\n</think>\n\n{CALLED}<think>\nHm.\n</think>",
    ),
    (
        "a question, its answer and a column of reasoning",
        {"instruction": "Weather?", "output": "Clear.", "reasoning": "Hm.\n"}, [ASKED, SAID | {"reasoning": "Hm.\n"}], None,
        "<think>\nHm.\n</think>\n\nClear.",
    ),
    (
        "prompt and completion with tools",
        {"prompt": [ASKED], "completion": [{"role": "assistant", "tool_calls": [{"name": "get_weather", "arguments": {}}]}], "tools": [WEATHER]},
        [ASKED, {"role": "assistant", "tool_calls": [{"name": "get_weather", "arguments": {}}]}], [WEATHER],
        '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>',
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "messages", "tools", "learned"), [one[1:] for one in ROWS], ids=[one[0] for one in ROWS]
)
def test_ingest_encodes_as_the_exported_template_and_only_answers_carry_loss(
    tokenizer: Tokenizer, hf: Any, row: dict[str, Any], messages: list[dict[str, Any]], tools: Any, learned: str
) -> None:
    said, _ = turns_of(row)
    ids, mask = tokenizer.encode_messages(said)
    assert ids[:-1].tolist() == served(hf, messages, tools)
    assert tokenizer.decode(ids[mask]) == learned
    answers = sum(turn["role"] == "assistant" and turn.get("weight") != 0 for turn in said)
    assert (ids[mask] == tokenizer.stop_token).sum() == answers
    assert tokenizer.decode_document(ids.astype(int), mask) == {"messages": said}, "a token shard gives the turns back"


def test_tools_as_vllm_fills_them_and_tools_of_a_row_give_the_same_ids(tokenizer: Tokenizer, hf: Any) -> None:
    """vLLM adds missing keys with null, in the order of its own fields."""
    row = {"name": "get_weather", "parameters": {"b": 1, "a": 2}, "strict": True}
    filled = {"type": "function", "function": {"name": "get_weather", "description": None, **row}}
    said, notes = turns_of({"messages": [ASKED, SAID], "tools": [{"strict": True, **row}]})
    assert tokenizer.encode_messages(said)[0][:-1].tolist() == served(hf, [ASKED, SAID], [filled])
    line = '{"type": "function", "function": {"name": "get_weather", "parameters": {"b": 1, "a": 2}, "strict": true}}'
    assert line in said[0]["content"].split("\n") and said[0]["role"] == "system"
    assert codes(notes.messages) == ["shapes.tools_listed"] and not notes.unread_fields


@pytest.mark.parametrize(
    "system",
    ["Use get_weather.", "<tools> of get_weather", "<tools>[]</tools> get_weather", "<tools>['other']</tools>"],
)
def test_a_system_message_that_only_names_a_tool_gets_the_list_of_tools(system: str) -> None:
    said, _ = turns_of({"messages": [SYSTEM | {"content": system}, ASKED, SAID], "tools": [WEATHER]})
    assert said[0]["content"].startswith(f"{system}\n\n# Tools") and "naïve ☃" in said[0]["content"] and len(said) == 3


characters = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
ODD = [*SPECIAL, f"a{SPECIAL[2]}\n\"'", "</tool_call>", "<b>&amp;</b>", "\\", "\n\n", "{{ x }}", "é", "\u2028"]
odd = st.one_of(characters, st.sampled_from(ODD))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | odd,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(odd, inner, max_size=3),
    max_leaves=8,
)
named = odd.filter(bool)


@given(st.dictionaries(odd, values, max_size=4), named, odd, odd, odd, values, st.booleans())
@settings(deadline=None, max_examples=80)
def test_odd_content_gives_the_same_ids_and_no_special_token(
    tokenizer: Tokenizer, hf: Any, arguments: Any, name: str, content: str, reasoning: str, system: str, extra: Any, as_text: bool
) -> None:  # fmt: skip
    """The template inserts a blank into each special token that the content spells."""
    function = {"name": name, "description": reasoning, "parameters": arguments, "extra": extra}
    tool = {"type": "function", "function": function}
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    answer = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls}
    messages = [{"role": "system", "content": system}, ASKED, answer, {"role": "tool", "content": "3"}]
    row = json.loads(json.dumps(messages))
    if as_text:
        row[2]["tool_calls"][0]["function"]["arguments"] = json.dumps(arguments)
    notes = ReadingNotes()
    said = parse_document({"messages": row, "tools": [tool]}, "text", None, notes).content["messages"]
    broken = [turn | {"content": put_blanks_in_special_tokens(turn["content"])} for turn in said]
    found = served(hf, messages, [tool])
    assert tokenizer.encode_messages(broken)[0][:-1].tolist() == found
    assert [token for token in found if token < 3] == [0, *[1, 2] * 4], "those of the frame alone"
    ids = tokenizer.encode_messages(said)[0][:-1]
    assert ids[ids < 3].tolist() == [0, *[1, 2] * 4]


def test_the_template_refuses_messages_that_it_cannot_show_as_ingest_does(hf: Any) -> None:
    for messages, said in (
        ([ASKED, CALLS], "expected an object"),
        ([ASKED, SAID | {"content": [{"type": "text", "text": "a"}]}], "content: expected text"),
        ([ASKED, {"role": "assistant", "content": None}], "content: expected text"),
        ([{"role": "system", "content": None}, ASKED], "content: expected text"),
        ([ASKED, SAID | {"reasoning": {"a": 1}}], "reasoning: expected text"),
        ([ASKED | {"role": "ipython"}], "role: expected"),
    ):
        with pytest.raises(Exception, match=said):
            served(hf, messages, [WEATHER])


def result(**changes: Any) -> dict[str, Any]:
    return {"messages": [ASKED, CALLS, RESULTS[0] | changes, SAID], "tools": [WEATHER]}


def calling(call: Any, **message: Any) -> dict[str, Any]:
    return {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": call} | message, SAID]}


@pytest.mark.parametrize(
    ("row", "code", "data"),
    [
        (calling([CALL | {"function": {"name": "f", "arguments": "{'a': 1}"}}]),
         "shapes.text_not_json", {"where": "message 1: 'tool_calls': the arguments of 'f'"}),
        (calling([CALL | {"function": {"name": "f", "arguments": "[1]"}}]), "shapes.arguments_type", {"function": "f", "kind": "list"}),
        (calling([{}]), "shapes.unnamed_call", {"where": "message 1: 'tool_calls'"}),
        (calling("get_weather()"), "shapes.text_not_json", {"where": "message 1: 'tool_calls'"}),
        (calling([CALL | {"type": "retrieval"}]), "shapes.function_type", {"kind": "retrieval"}),
        (calling([{"name": "f", "parameters": {"a": 1}}]), "shapes.call_key", {"key": "parameters"}),
        (calling([CALL], function_call=CALL["function"]), "shapes.calls_twice", {"where": "message 1"}),
        (calling([CALL], content=f"So: {CALLED}"), "shapes.calls_twice", {"where": "message 1"}),
        (calling([CALL], role="user"), "shapes.field_not_shown", {"fields": ["tool_calls"]}),
        (result(tool_call_id="c2"), "shapes.order_of_results", {"result": "c2", "call": "c1"}),
        (result(name="other"), "shapes.field_not_shown", {"fields": ["name"]}),
        ({"messages": [ASKED, {"role": "tool", "content": "3", "tool_call_id": "c1"}, SAID]},
         "shapes.field_not_shown", {"fields": ["tool_call_id"]}),
        ({"messages": [ASKED, SAID | {"reasoning": "a", "thinking": "b"}]}, "shapes.reasoning_differs", {"names": ["reasoning", "thinking"]}),
        ({"messages": [ASKED, SAID | {"reasoning_content": ["a"]}]},
         "shapes.reasoning_type", {"name": "reasoning_content", "kind": "list"}),
        ({"messages": [ASKED, SAID | {"content": "<think>a</think>b", "reasoning": "a"}]},
         "shapes.reasoning_twice", {"where": "message 1", "fields": ["reasoning"]}),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]], "thinking": "a"}, "shapes.field_not_shown", {"fields": ["thinking"]}),
        ({"prompt": "a", "completion": "<think>b", "thinking": "a"}, "shapes.reasoning_twice", {"where": "the row"}),
        ({"messages": [ASKED, SAID], "tools": [{"type": "web_search"}]}, "shapes.unnamed_tool", {"where": "tools.0"}),
        ({"messages": [ASKED, SAID], "tools": [WEATHER | {"type": "mcp"}]}, "shapes.function_type", {"where": "tools.0", "kind": "mcp"}),
        ({"messages": [ASKED, SAID], "tools": [WEATHER | {"cache": "yes"}]}, "shapes.beside_function", {"where": "tools.0", "key": "cache"}),
        ({"messages": [ASKED, SAID], "tools": [WEATHER], "functions": [WEATHER["function"]]},
         "shapes.tools_twice", {"fields": ["tools", "functions"]}),
        ({"messages": [ASKED, SAID | {"function_calls": "f()"}]}, "shapes.field_not_shown", {"fields": ["function_calls"]}),
    ],
)  # fmt: skip
def test_a_row_is_dropped_if_its_call_or_tool_is_malformed_or_out_of_place(
    row: dict[str, Any], code: str, data: dict[str, Any]
) -> None:
    with refused(code, BadRow, **data) as caught:
        turns_of(row)
    assert caught.value.rule == "bad_schema" and "\n" not in str(caught.value)


def test_a_row_with_a_number_that_json_cannot_express_is_dropped() -> None:
    for value in (float("nan"), float("inf")):
        with refused("shapes.not_json", BadRow):
            parse_document(calling([{"name": "f", "arguments": {"a": value}}]), "text")
    with refused("ingest.surrogate", BadRow):
        parse_document(calling([{"name": "f", "arguments": '{"a": "\\ud800"}'}]), "text")


def test_a_tokenizer_keeps_an_older_template_and_refuses_fields_that_it_cannot_show(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    assert has_template_with_tool_calls(tokenizer.folder) and has_template_with_tool_calls(tmp_path / "not there yet")
    tokenizer.copy_to(tmp_path / "older")
    (tmp_path / "older" / "chat_template.jinja").write_text(TEMPLATE_WITHOUT_CALLS)
    older = Tokenizer.load(tmp_path / "older")
    assert (
        not has_template_with_tool_calls(older.folder)
        and older.chat_template == TEMPLATE_WITHOUT_CALLS != tokenizer.chat_template
    )
    older.copy_to(tmp_path / "export")
    assert (tmp_path / "export" / "chat_template.jinja").read_text() == TEMPLATE_WITHOUT_CALLS
    row = {"messages": [ASKED, CALLS, *RESULTS, SAID | {"reasoning": "a"}], "tools": [WEATHER]}
    with refused("shapes.field_not_shown_here", fields=["reasoning", "tool_call_id", "tool_calls", "tools"]):
        turns_of(row, plain=True)
    assert turns_of({"messages": [ASKED, SAID]}, plain=True)[0] == [ASKED, SAID]


def chats(first: int, count: int) -> list[dict[str, Any]]:
    """Chats of one application: all have the same tools, which are most of their text."""
    tools = [
        {"name": f"f{n}", "description": prose(n, 60), "parameters": {"type": "object", "properties": {}}}
        for n in range(8)
    ]
    found = []
    for n in range(first, first + count):
        call = {"id": f"c{n}", "function": {"name": "f1", "arguments": json.dumps({"what": prose(3000 + n, 12)})}}
        found.append(
            {
                "id": f"t{n}",
                "license": "MIT",
                "tools": tools,
                "messages": [
                    {"role": "user", "content": prose(1000 + n, 20)},
                    {
                        "role": "assistant",
                        "content": None,
                        "reasoning_content": prose(2000 + n, 8),
                        "tool_calls": [call],
                    },
                    {"role": "tool", "tool_call_id": f"c{n}", "content": prose(4000 + n, 20)},
                    {"role": "assistant", "content": prose(5000 + n, 20)},
                ],
            }
        )
    return found


def test_chats_with_the_same_tools_are_not_copies_of_one_another(
    workspace: Workspace, ledger: Ledger, ingest: Callable[..., ShardReport]
) -> None:
    """A shared list of tools makes chats neither near-duplicates nor contaminated, within one shard and over two."""
    reports = [ingest(chats(0, 24), "a.jsonl"), ingest(chats(24, 6), "b.jsonl")]
    assert [report.counts["dropped"] for report in reports] == [{}, {}]
    assert [report.counts["train"] + report.counts["held_out"] for report in reports] == [24, 6]
    assert reports[0].counts["held_out"] > 0 and "unread" not in reports[0].counts
    read_as = reports[0].counts["read_as"]
    assert list(read_as.values()) == [24, 24, 24]
    assert [re.search(r"<\w+>", how)[0] for how in sorted(read_as)] == ["<think>", "<tool_call>", "<tools>"]
    tokenizer = Tokenizer.load(workspace.tokenizer)
    token_shards = [TokenShard(path) for path in workspace.shards.glob("[0-9a-f]*")]
    for shard in token_shards:
        columns = shard.documents.to_pydict()
        for name, start, length in zip(columns["id"], columns["start"], columns["length"], strict=True):
            ids, mask = shard.tokens[start : start + length], shard.read_loss_mask(start, start + length)
            n = int(name[1:])
            assert tokenizer.decode(ids[mask]) == (
                f'<think>\n{prose(2000 + n, 8)}\n</think>\n\n<tool_call>\n{{"name": "f1", "arguments": '
                f'{{"what": {json.dumps(prose(3000 + n, 12))}}}}}\n</tool_call>{prose(5000 + n, 20)}'
            )
    checks = check_contamination(ledger, tokenizer, token_shards, EvalPolicy())
    assert all(check.ok for check in checks), checks
    assert "has 0% of its" in checks[1].detail


def test_a_workspace_with_an_older_template_drops_rows_with_calls_and_says_why(
    workspace: Workspace, ingest: Callable[..., ShardReport]
) -> None:
    ingest([{"text": prose(n)} for n in range(20)], "first.jsonl")
    (workspace.tokenizer / "chat_template.jinja").write_text(TEMPLATE_WITHOUT_CALLS)
    plain = [
        {"messages": [ASKED | {"content": prose(6000 + n, 20)}, SAID | {"content": prose(7000 + n, 20)}]}
        for n in range(20)
    ]
    report = ingest([*chats(0, 3), *plain], "a.jsonl")
    assert report.counts["dropped"] == {"bad_schema": 3} and report.counts["train"] + report.counts["held_out"] == 20
    assert "this workspace is too old" in report.counts["examples"]["bad_schema"]
