"""Makes questions and answers about a module from its docstrings and signatures. The result is deterministic: a hash picks the wording.

Every run of 13 words in a wording contains a name from the module. Otherwise, chats would share the run and count as contaminated.
"""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Messages = list[dict[str, str]]
_LONGEST_ANSWER = 900  # characters
_LONGEST_SIGNATURE = 240
_LISTED = 12


@dataclass(frozen=True)
class DocumentedName:
    """One documented name of a module. ``head``: its ``def`` or ``class`` line; empty for a module. ``members``: the parameters of a function, or the
    public names of a class or module.
    """

    kind: str  # 'module' | 'class' | 'function' | 'method'
    module: str
    path: str  # 'json.decoder.JSONDecoder.decode'
    head: str
    doc: str
    members: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.rsplit(".", 1)[-1]


_PURPOSE = (
    "What does `{path}` do?",
    "Explain the {kind} `{path}`.",
    "What is `{path}` for?",
    "Tell me about the {kind} `{name}` of `{owner}`.",
)
_SIGNATURE = (
    "Write the signature of `{path}`.",
    "How is `{path}` declared? Answer with a Python stub.",
    "Give me the signature of the {kind} `{name}` of `{owner}`.",
    "I forgot how to call `{path}`. Write its signature.",
)
_WHICH = (
    "Which {kind} of `{owner}` fits this description? {summary}",
    "I need a {kind} from `{owner}`: {summary} What is it called?",
)
_MEMBERS = (
    "Which public names does `{path}` define?",
    "List what I find in the {kind} `{path}`.",
)
_PARAMETERS = (
    "Which parameters does `{path}` take?",
    "What can I pass to `{path}`?",
)


def make_chats(documented_names: Sequence[DocumentedName]) -> Iterator[Messages]:
    """Yield all chats about one module."""
    for one in documented_names:
        answer = summarise_docstring(one.doc, _LONGEST_ANSWER)
        signature = f"{one.head} ..." if one.kind in ("function", "method") else ""
        parameters = tuple(name for name in one.members if name not in ("self", "cls"))
        usable = 0 < len(signature) <= _LONGEST_SIGNATURE and bool(one.doc or parameters)
        if answer and usable and _pick(one.path, "turns", 4) == 0:
            yield [*_turn(_PURPOSE, one, answer), *_turn(_SIGNATURE, one, signature)]
        else:
            if answer:
                yield _turn(_PURPOSE, one, answer)
            if usable:
                yield _turn(_SIGNATURE, one, signature)
        short = summarise_docstring(one.doc, 160)
        if short and one.kind != "module" and one.name not in short and one.name != "__init__":
            yield _turn(_WHICH, one, f"`{one.path}`", short)
        if one.kind in ("module", "class") and len(one.members) >= 2:
            yield _turn(_MEMBERS, one, _listed(one.members))
        if usable and len(parameters) >= 2 and _pick(one.path, "parameters", 3) == 0:
            yield _turn(_PARAMETERS, one, _listed(parameters))


def summarise_docstring(doc: str, longest: int) -> str:
    """Return the first paragraphs of a docstring, up to ``longest`` characters; empty if the first does not fit."""
    kept: list[str] = []
    size = 0
    for paragraph in textwrap.dedent(doc).strip().split("\n\n"):
        size += len(paragraph) + 2
        if size > longest + 2 or paragraph.lstrip().startswith(">>>"):
            break
        kept.append(paragraph.strip("\n"))
    summary = "\n\n".join(kept).strip()
    return summary if len(summary) >= 20 else ""


def _turn(wordings: Sequence[str], one: DocumentedName, answer: str, summary: str = "") -> Messages:
    owner = one.path.rsplit(".", 1)[0] if "." in one.path else one.path
    wording = wordings[_pick(one.path, wordings[0], len(wordings))]
    if one.kind == "module" and "{owner}" in wording:
        wording = wordings[0]
    question = wording.format(
        path=one.path, kind=one.kind, name=one.name, owner=owner, summary=" ".join(summary.split())
    )
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_LISTED])
    return f"{shown} and {len(names) - _LISTED} more" if len(names) > _LISTED else shown


def _pick(path: str, what: str, of: int) -> int:
    return hashlib.sha256(f"{what}:{path}".encode()).digest()[0] % of
