"""Renders a chat template (Jinja), which is untrusted, within bounds.

The environment is that of transformers 5 (its file chat_template_utils.py): immutable and sandboxed, ``trim_blocks``, ``lstrip_blocks``, loop
controls, the tag ``generation``, ``tojson`` without HTML escapes, ``raise_exception`` and ``strftime_now``. Jinja's sandbox keeps a template from
Python, but not from endless work. Here every loop pass and macro call counts as a step, and every text that a filter, a method or an operator makes
has a largest length.
"""

from __future__ import annotations

import datetime
import functools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

from factory.core.errors import InputError

MOST_STEPS = 200_000  # loop passes and macro calls in one rendering
MOST_CHARACTERS = 64_000_000  # of one text
MOST_SECONDS = 20.0
_MOST_NUMBER = 1_000_000  # largest number that a filter or a method may get, since it may be a width
_LONGEST_SOURCE = 1_000_000  # characters of a template
# The date of documents. Their ids must not depend on the day, so that a token shard can be made again. Llama 3.1's template has this date too.
DATE_OF_DOCUMENTS = datetime.datetime(2024, 7, 26)

NOT_SHOWN = ("weight", "tools")  # keys of a document's messages that no template gets with the message

Chat = Sequence[Mapping[str, Any]]


class ChatRefusedError(InputError):
    """The error of a chat that the template refuses or cannot write, or whose answers cannot be found in what it wrote."""


class _Exhausted(Exception):
    """A template went beyond a bound."""


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.steps, self.deadline = 0, 0.0
        self.now = DATE_OF_DOCUMENTS
        self.filters = {name: _bounded(function) for name, function in {**self.filters, "tojson": _tojson}.items()}
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda form: self.now.strftime(form),
            "dict": _TemplateDict(),
            "namespace": _TemplateNamespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        kinds: tuple[type[Any], ...] = (jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock)
        for kind in kinds:
            for loop in tree.find_all(kind):
                step = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("count_step"), [], [], None, None)
                loop.body.insert(0, jinja2.nodes.ExprStmt(step).set_lineno(loop.lineno))
        _bound_joins(tree)
        return tree

    def count_step(self) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS or time.monotonic() > self.deadline:
            raise _Exhausted

    def join_texts(self, *parts: Any) -> str:
        return _measured("".join(map(str, parts)))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if (
                    isinstance(one, str | list | tuple)
                    and isinstance(other, int)
                    and len(one) * other > MOST_CHARACTERS
                ):
                    raise _Exhausted
        if operator in ("*", "**") and any(
            isinstance(part, int) and abs(part) > _MOST_NUMBER for part in (left, right)
        ):
            raise _Exhausted
        if operator == "**" and isinstance(right, int) and right > 64:
            raise _Exhausted
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
        return _measured(super().call_binop(context, operator, left, right))

    def call(self, context: jinja2.runtime.Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check_numbers(args, kwargs)
        owner = getattr(called, "__self__", None)
        if isinstance(owner, str):
            if called.__name__ == "replace" and len(args) > 1:
                _check_replacement(owner, *args[:2])
            if called.__name__ in ("format", "format_map"):
                _check_widths(owner)
        return _measured(super().call(context, called, *args, **kwargs))


class _Generation(jinja2.ext.Extension):
    """The tag with which some templates enclose what the assistant writes. It writes its body, in a scope of its own."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = jinja2.nodes.CallBlock(self.call_method("write_body"), [], [], body)
        block.set_lineno(line)
        return block

    def write_body(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateDict:
    """What a template gets under the name ``dict``."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(jinja2.utils.Namespace):
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        if any(str(name).startswith("_") for name in dict(*args, **kwargs)):
            raise jinja2.exceptions.SecurityError("namespace")
        jinja2.utils.Namespace.__init__(self, *args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError("namespace")
        super().__setitem__(name, value)


class ChatTemplate:
    """A compiled chat template. ``variables``: the named tokens, such as ``bos_token``."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Raises: InputError for a template that is not valid Jinja."""
        self.source, self.variables = source, dict(variables)
        self._environment = _Environment()
        self._lock = threading.Lock()  # a rendering counts its steps in the environment
        try:
            if len(source) > _LONGEST_SOURCE:
                raise ValueError(f"it has {len(source)} characters")
            self._compiled = self._environment.from_string(source)
        except (jinja2.exceptions.TemplateError, ValueError, RecursionError, SyntaxError) as error:
            raise InputError(
                "ingest.bad_template",
                "the chat template is not a valid Jinja template: {error}. Correct chat_template.jinja",
                error=str(error)[:200],
            ) from error

    def render(
        self,
        messages: Chat,
        waits: bool = False,
        tools: Sequence[Any] | None = None,
        now: datetime.datetime = DATE_OF_DOCUMENTS,
    ) -> str:
        """Return the text of a chat. ``waits``: up to the assistant's next answer. Raises: ``ChatRefusedError``."""
        with self._lock:
            environment = self._environment
            environment.steps, environment.deadline, environment.now = 0, time.monotonic() + MOST_SECONDS, now
            return self._render(messages, waits, tools)

    def _render(self, messages: Chat, waits: bool, tools: Sequence[Any] | None) -> str:
        parts: list[str] = []
        length = 0
        try:
            for part in self._compiled.generate(
                **self.variables,
                messages=[_with_reasoning_names(message) for message in messages],
                tools=_plain(tools),
                documents=None,
                add_generation_prompt=waits,
            ):
                length += len(part)
                if length > MOST_CHARACTERS:
                    raise _Exhausted
                parts.append(part)
        except (_Exhausted, MemoryError, RecursionError) as error:
            raise ChatRefusedError(
                "ingest.template_bound",
                "the chat template needs more than {steps:,} steps, {seconds:g} seconds or {characters:,} characters for a chat",
                steps=MOST_STEPS,
                seconds=MOST_SECONDS,
                characters=MOST_CHARACTERS,
            ) from error
        except Exception as error:  # whatever a template's expressions raise is the template's refusal
            raise ChatRefusedError(
                "ingest.template_refuses", "the chat template refuses the chat: {error}", error=str(error)[:200]
            ) from error
        return "".join(parts)


def _with_reasoning_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as transformers gives it to a template: with reasoning under each of its names, without nulls, and nothing but JSON values."""
    given = {str(key): _plain(value) for key, value in message.items() if key not in NOT_SHOWN}
    found: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((found[name] for name in names if found.get(name) is not None), None)
    return found if reasoning is None else {"thinking": reasoning, **found, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_plain(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if value is None or isinstance(value, str | int | float | bool) else f"<{type(value).__name__}>"


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # keeps Jinja's mark of a filter that gets the environment
    def measured(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(args, kwargs)
        if getattr(function, "__name__", "") == "do_replace" and len(args) >= 4:
            _check_replacement(*map(str, args[1:4]))
        if getattr(function, "__name__", "") == "do_format" and args:
            _check_widths(str(args[0]))
        return _measured(function(*args, **kwargs))

    return measured


def _bound_joins(node: jinja2.nodes.Node) -> None:
    """Replace each ``~`` below a node by a call that measures the joined text."""
    for name, value in list(node.iter_fields()):
        parts = value if isinstance(value, list) else [value]
        made = []
        for part in parts:
            if isinstance(part, jinja2.nodes.Node):
                _bound_joins(part)
                if isinstance(part, jinja2.nodes.Concat):
                    joined = jinja2.nodes.EnvironmentAttribute("join_texts")
                    part = jinja2.nodes.Call(joined, part.nodes, [], None, None).set_lineno(part.lineno or 1)
            made.append(part)
        setattr(node, name, made if isinstance(value, list) else made[0])


def _measured(value: Any) -> Any:
    if isinstance(value, str | list | tuple | dict) and len(value) > MOST_CHARACTERS:
        raise _Exhausted
    return value


def _check_numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if any(type(value) in (int, float) and abs(value) > _MOST_NUMBER for value in (*args, *kwargs.values())):
        raise _Exhausted


def _check_replacement(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str) and (text.count(old) * len(new)) > MOST_CHARACTERS:
        raise _Exhausted


def _check_widths(form: str) -> None:
    digits = 0
    for letter in form:
        digits = digits + 1 if letter.isdigit() else 0
        if digits > 6:
            raise _Exhausted
