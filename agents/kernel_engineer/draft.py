"""From what the model said to a ``Proposal``, or to what is wrong with it. Nothing of it is believed; all of it is bounded and cleaned."""

from __future__ import annotations

import json
from typing import Any

from agents.kernel_engineer.targets import Target
from agents.proposal import Edit, Proposal
from agents.untrusted import one_line
from agents.workbench import ReadError, Workbench

AGENT = "kernel-engineer"
MOST_EDITS = 32
LARGEST = 1e30
LEAST_PREDICTED = 1.005  # less cannot be refuted by any measurement here


class DraftError(Exception):
    """What is wrong with a draft, in words that the model may act on."""


def read_draft(arguments: str, target: Target, workbench: Workbench) -> Proposal:
    """The proposal that a call of ``propose`` makes. Raises: DraftError."""
    try:
        raw = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise DraftError(f"the arguments are no JSON ({one_line(str(error), 120)}); were they cut off?") from None
    if not isinstance(raw, dict):
        raise DraftError("the arguments are no object")
    title, hypothesis = (one_line(_text(raw, key), limit) for key, limit in (("title", 80), ("hypothesis", 2000)))
    if not title or not hypothesis:
        raise DraftError("title and hypothesis may not be empty")
    gain, saved, work = (_number(raw, key) for key in ("predicted_gain", "bytes_saved", "flops_saved"))
    if not LEAST_PREDICTED <= gain <= target.most + 0.0005:  # as it was told, rounded
        raise DraftError(
            f"predicted_gain is {gain:g}; for this target it lies between {LEAST_PREDICTED} and {target.most:.3f}"
        )
    if saved < 0 or work < 0 or saved + work == 0:
        raise DraftError("say what the patch saves: bytes_saved or flops_saved above zero, neither below")
    words = (
        f"{hypothesis} Predicted: {saved:.3g} bytes and {work:.3g} FLOPs less a step. If the whole step does not get at least "
        f"{1 + (gain - 1) / 2:.3f} times as fast (predicted: {gain:.3f}), or held-out evaluations get worse, this is refuted."
    )
    return Proposal(AGENT, target.name, title, words, gain, _edits(raw.get("edits"), workbench))


def _edits(raw: Any, workbench: Workbench) -> tuple[Edit, ...]:
    if not isinstance(raw, list) or not raw:
        raise DraftError("edits is a list of at least one edit")
    if len(raw) > MOST_EDITS:
        raise DraftError(f"{len(raw)} edits, {MOST_EDITS} may be")
    texts: dict[str, str] = {}
    for number, edit in enumerate(raw, 1):
        if not isinstance(edit, dict):
            raise DraftError(f"edit {number} is no object")
        path = _text(edit, "path", f"edit {number}: ")
        if len(path) > 200 or not path.isascii() or not path.isprintable():
            raise DraftError(f"edit {number}: the path is not plain: {one_line(ascii(path), 120)}")
        if ("new_text" in edit) == ("find" in edit):
            raise DraftError(f"edit {number}: give either new_text, or find and replace")
        if "new_text" in edit:
            texts[path] = _text(edit, "new_text", f"edit {number}: ")
            continue
        find, replace = (_text(edit, key, f"edit {number}: ") for key in ("find", "replace"))
        before = texts[path] if path in texts else _read(workbench, path, number)
        times = before.count(find) if find else 0
        if times != 1:
            raise DraftError(f"edit {number}: 'find' occurs {times} times in {path}, it must occur exactly once")
        texts[path] = before.replace(find, replace)
    return tuple(Edit(path, text) for path, text in texts.items())


def _read(workbench: Workbench, path: str, number: int) -> str:
    try:
        return workbench.read(path)
    except ReadError as error:
        raise DraftError(f"edit {number}: {one_line(str(error), 200)}") from None


def _text(raw: dict[str, Any], key: str, where: str = "") -> str:
    value = raw.get(key)
    if not isinstance(value, str):
        raise DraftError(f"{where}{key} is no text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DraftError(f"{where}{key} holds half a character (a lone surrogate)") from None
    return value


def _number(raw: dict[str, Any], key: str) -> float:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -LARGEST < value < LARGEST:
        raise DraftError(f"{key} is no number")
    return float(value)
