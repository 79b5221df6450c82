"""Tools, calls and reasoning of documents are written through the template of another model, as transformers writes them."""

from __future__ import annotations

import datetime
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from factory.core.workspace import Workspace
from factory.ingest.chain import ingest_shard
from factory.ingest.document import normalise_content, parse_document
from factory.ingest.installing import install_model_tokenizer
from factory.ingest.shapes.chats import ReadingNotes
from factory.ingest.tokenizer import Tokenizer, find_structure
from factory.ingest.tokenizing.chat_rendering import ChatRefusedError, ChatTemplate
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from tests.support.factory.made_up_text import prose
from tests.support.messages import refused
from tests.support.text.library import library
from tests.support.tokenizers.families import CHATML, FAMILIES
from tests.support.tokenizers.odd_chats import CONTENTS
from tests.support.tokenizers.tool_templates import STYLES, make_template
from trainer.contract.data.token_shard import TokenShard

ARGUMENTS: tuple[Any, ...] = (
    {}, {"town": "Zürich\n"}, {"days": [1, 2.5, None], "deep": {"a": {"b": []}}}, {"q": 'a "quoted" \\ back'}, {"x": "<b> & 'y'"},
    {"日本": "☃\u2028"},
    {"text": "</tool_call> <tool_call>"},
    {"n": -1.5e-7, "ok": True}, {"empty": ""},
)  # fmt: skip


def make_tool(name: str, draw: random.Random) -> dict[str, Any]:
    kinds = draw.sample(["string", "number", "integer", "boolean", "object"], 2)
    properties = {
        "town": {"type": kinds[0], "description": "naïve ☃ <b>"},
        "days": {"type": "array", "items": {"type": kinds[1]}},
    }
    parameters = {"type": "object", "properties": properties, "required": ["town"]}
    function = {"name": name, "description": f'Does {name} & "more"', "parameters": parameters}
    return {"type": "function", "function": function}


def make_rows(count: int, seed: int = 7) -> list[dict[str, Any]]:
    """Rows of a data set with tools, as a file has them: calls with ids and arguments as text, reasoning under three names, null contents."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        content = lambda: " ".join(draw.choices([text for text in CONTENTS if text.strip()], k=draw.choice((1, 1, 2))))
        names = draw.sample(["weather", "get_río", "f2"], draw.randint(1, 3))
        messages: list[dict[str, Any]] = []
        if draw.random() < 0.5:
            messages.append({"role": "system", "content": draw.choice((content(), "Be brief. /no_think"))})
        for turn in range(draw.randint(1, 3)):
            messages.append({"role": "user", "content": content()})
            thinks = lambda turn=turn, content=content: {
                draw.choice(("reasoning_content", "reasoning", "thinking")): f"Hm {turn}: {content()}"
            }
            for step in range(draw.choice((0, 1, 1, 2))):
                calls = [
                    {
                        "id": f"call{number}{turn}{step}{at}",
                        "type": "function",
                        "function": {
                            "name": draw.choice(names),
                            "arguments": draw.choice([json.dumps, dict])(draw.choice(ARGUMENTS)),
                        },
                    }
                    for at in range(draw.choice((1, 1, 1, 2)))
                ]
                said = {"role": "assistant", "content": draw.choice((None, "", "One moment."))}
                messages.append(said | {"tool_calls": calls} | (thinks() if draw.random() < 0.4 else {}))
                messages += [{"role": "tool", "tool_call_id": call["id"], "content": content()} for call in calls]
            answer = {"role": "assistant", "content": content()} | (thinks() if draw.random() < 0.5 else {})
            messages.append(answer | ({"weight": 0} if turn and draw.random() < 0.2 else {}))
        row: dict[str, Any] = {"id": f"r{number}", "messages": messages, "license": "MIT"}
        rows.append(row | ({"tools": [make_tool(name, draw) for name in names]} if draw.random() < 0.8 else {}))
    return rows


class Styled:
    """A tokenizer with the template of a style, here and in transformers."""

    def __init__(self, folder: Path, name: str) -> None:
        from transformers import AutoTokenizer

        family, structure = STYLES[name]
        FAMILIES[family].write(folder, [library()[one].text for one in ("inspect", "json")])
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        text = make_template(name, tagged=False)
        config["chat_template"] = text
        if name == "hermes":
            config["chat_template"] = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": text}]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        self.name, self.folder, self.structure = name, folder, structure
        self.here, self.there = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)

    def read(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of a row as ingest reads it. Reasoning is left out where the template takes none."""
        row = json.loads(json.dumps(row))
        if "reasoning" not in self.structure:
            row["messages"] = [
                {k: v for k, v in one.items() if k not in ("reasoning_content", "reasoning", "thinking")}
                for one in row["messages"]
            ]
        parsed = parse_document(row, "text", None, ReadingNotes(True, find_structure(self.folder)))
        return list(normalise_content(parsed.content, code=False)["messages"])

    def apply(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        """What transformers gives; None if the template refuses the chat."""
        clean = [{key: value for key, value in one.items() if key not in ("weight", "tools")} for one in messages]
        try:
            return self.there.apply_chat_template(
                clean, tools=messages[0].get("tools"), tokenize=True, return_dict=True, **options
            )
        except Exception:
            return None


@pytest.fixture(scope="module")
def styles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Styled]:
    root = tmp_path_factory.mktemp("styles")
    return {name: Styled(root / name, name) for name in STYLES}


@pytest.mark.parametrize("name", STYLES)
def test_what_a_template_takes_is_found(styles: dict[str, Styled], name: str) -> None:
    assert find_structure(styles[name].folder) == styles[name].structure


# Chats that the template refuses (Llama 3.1: two calls at once), and that it would write without their calls (Hermes without tools).
REFUSED = {"qwen3": (0, 0), "llama3.1": (81, 0), "smollm3": (0, 0), "hermes": (0, 26)}


@pytest.mark.slow("200 chats for each template")
@pytest.mark.parametrize("name", STYLES)
def test_200_odd_chats_with_tools_get_the_ids_and_masks_of_transformers(styles: dict[str, Styled], name: str) -> None:
    """The tags are in the template that transformers gets for the masks, and not in the one with which they are found."""
    style, compared, refusals, lost, calls = styles[name], 0, 0, 0, 0
    tagged = make_template(name, tagged=True)
    for row in make_rows(200):
        messages = style.read(row)
        theirs = style.apply(messages)
        try:
            ids, mask = style.here.encode_chat(messages, datetime.datetime.now(), strict=True)
        except ChatRefusedError as error:
            if error.code == "ingest.structure_not_written":
                assert style.here.encode_chat(messages, datetime.datetime.now())[0].tolist() == list(
                    theirs["input_ids"]
                )
                lost += 1
                continue
            assert error.code == "ingest.template_refuses" and theirs is None, (error, messages)
            refusals += 1
            continue
        assert ids.tolist() == list(theirs["input_ids"]), messages
        prompt = style.here.encode_chat_prompt(messages, datetime.datetime.now())
        assert prompt.tolist() == list(style.apply(messages, add_generation_prompt=True)["input_ids"])
        heavy = [{key: value for key, value in one.items() if key != "weight"} for one in messages]
        mask = mask if heavy == messages else style.here.encode_chat(heavy, datetime.datetime.now())[1]
        if not (name == "hermes" and "tools" not in messages[0]):
            marked = style.apply(heavy, chat_template=tagged, return_assistant_tokens_mask=True)
            assert [bool(flag) for flag in marked["assistant_masks"]] == mask.tolist(), messages
        said = style.here.decode(ids[mask])
        for call in (call for one in heavy for call in one.get("tool_calls", ())):
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            assert call["function"]["name"] in said and arguments in said
            calls += 1
        if compared % 5 == 0:
            again = style.here.encode_document(style.here.decode_document(ids, mask))
            assert np.array_equal(again[0], ids) and np.array_equal(again[1], mask)
        compared += 1
    assert (refusals, lost) == REFUSED[name] and compared >= 100 and calls > 100


@pytest.mark.parametrize("name", STYLES)
def test_documents_with_tools_are_ingested_and_their_calls_carry_loss(
    styles: dict[str, Styled], workspace: Workspace, ledger: Ledger, write_shard: Any, name: str
) -> None:
    style, plant = styles[name], Plant(workspace, ledger)
    install_model_tokenizer(style.folder, plant)
    call = lambda i: {
        "id": f"c{i}",
        "type": "function",
        "function": {"name": "weather", "arguments": json.dumps({"town": f"town {i}"})},
    }
    rows = [
        {
            "id": f"t{i}",
            "tools": [make_tool("weather", random.Random(i))],
            "messages": [
                {"role": "user", "content": prose(i, 12)},
                {"role": "assistant", "content": None, "tool_calls": [call(i)]},
                {"role": "tool", "tool_call_id": f"c{i}", "content": prose(500 + i, 12)},
                {"role": "assistant", "content": f"{prose(900 + i, 20)} ann.lee@firm-of-ann.com"},
            ],
            "license": "MIT",
        }
        for i in range(30)
    ]
    thinking = [
        {
            "id": "r",
            "messages": [
                {"role": "user", "content": prose(77)},
                {"role": "assistant", "content": prose(78), "reasoning": prose(79)},
            ],
        }
    ]
    report = ingest_shard(plant, write_shard([*rows, *(one | {"license": "MIT"} for one in thinking)]), workers=0)
    takes_reasoning = "reasoning" in style.structure
    assert report.counts["dropped"] == ({} if takes_reasoning else {"bad_schema": 1})
    (shard,) = [TokenShard(Path(one["path"])) for one in ledger.read("SELECT path FROM token_shards")]
    seen = 0
    for one in shard.documents.to_pylist():
        start, stop = one["start"], one["start"] + one["length"]
        ids, mask = shard.tokens[start:stop], shard.read_loss_mask(start, stop)
        said, whole = style.here.decode(ids[mask]), style.here.decode(ids)
        if one["id"] == "r":
            assert prose(79).strip()[:20] in said
            continue
        number = one["id"][1:]
        assert f'"town": "town {number}"' in said and "Does weather" in whole and "Does weather" not in said
        assert prose(500 + int(number), 12)[:20] not in said and "ann.lee" not in whole
        seen += 1
    assert seen >= 10


def test_a_template_without_tools_drops_them_and_says_why(
    workspace: Workspace, ledger: Ledger, write_shard: Any, tmp_path: Path
) -> None:
    plant = Plant(workspace, ledger)
    install_model_tokenizer(FAMILIES["llama3"].write(tmp_path / "plain", [prose(i) for i in range(60)]), plant)
    assert find_structure(workspace.tokenizer) == frozenset()
    plain = [{"id": f"p{i}", "text": prose(i), "license": "MIT"} for i in range(30)]
    report = ingest_shard(plant, write_shard([*plain, *make_rows(5)]), workers=0)
    assert report.counts["dropped"]["bad_schema"] == 5


def test_a_call_that_a_template_would_leave_out_is_refused(styles: dict[str, Styled]) -> None:
    """Hermes writes calls only in the template for chats with tools."""
    call = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call]}]
    with refused("ingest.structure_not_written", ChatRefusedError, part="weather"):
        styles["hermes"].here.encode_messages(chat)


EXPRESSIONS = (
    "{{ dict(a=1) }}{{ dict.fromkeys('ab', 0) }}", "{% set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}", "{{ missing }}|{{ missing is defined }}",
    "{{ messages[0].nothing is none }}{{ messages[0].nothing is defined }}", "{{ messages | tojson(indent=2) }}",
    "{{ {'b': 'é<', 'a': none} | tojson(sort_keys=true) }}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}", "  {% if true %}\n  a\n  {% endif %}\n b \n",
    "{{ messages[0] | items | list }}", "{{ tools }}|{{ documents }}|{{ add_generation_prompt }}",
    "{{ strftime_now('%Y') | length }}", "{{ messages[0] | string }}",
    "{{ messages[-1].thinking }}{{ messages[-1].reasoning_content }}", "{{ 'x' * 3 ~ [1, 2] | join('-') }}{{ 7 // 2 }}{{ 'a%sb' % 1 }}",
)  # fmt: skip


@pytest.mark.parametrize("source", EXPRESSIONS)
def test_an_expression_gives_what_it_gives_in_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = [
        {"role": "user", "content": "Hi", "nothing": None},
        {"role": "assistant", "content": "Ho", "reasoning": "Hm"},
    ]
    clean = [
        {key: value for key, value in one.items() if value is not None} for one in chat
    ]  # as apply_chat_template does
    (theirs,), _ = render_jinja_template([clean], chat_template=source, tools=None)
    assert ChatTemplate(source, {}).render(chat) == theirs


@pytest.mark.parametrize(
    "source", ["{% set n = namespace() %}{% set n._x = 1 %}", "{{ dict._x }}{{ dict.__class__.__mro__ }}"]
)
def test_what_transformers_refuses_is_refused(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    with pytest.raises(Exception, match="."):
        render_jinja_template([[{"role": "user", "content": "a"}]], chat_template=source)
    with refused("ingest.template_refuses", ChatRefusedError):
        ChatTemplate(source, {}).render([{"role": "user", "content": "a"}])
