"""The model's answer as a ``Proposal``, or what is wrong with it. The answer is untrusted: all of it is bounded and cleaned."""

from __future__ import annotations

from typing import Any

from agents.core.proposal import Edit, Proposal
from agents.core.untrusted import one_line
from agents.core.workbench import ReadError, Workbench
from agents.kernel_engineer.targets import ProfileTarget
from agents.loop.role import DraftError, number, read_object, text, title_and_hypothesis

AGENT = "kernel-engineer"
MOST_EDITS = 32
LEAST_PREDICTED = 1.005  # less cannot be refuted by any measurement here


def read_draft(arguments: str, target: ProfileTarget, workbench: Workbench, tried: str = "") -> Proposal:
    """The proposal that a call of ``propose`` makes, with the edits of the last ``try_patch`` if it has none. Raises: DraftError."""
    raw = read_object(arguments)
    title, hypothesis = title_and_hypothesis(raw)
    gain, saved, work = (number(raw, key) for key in ("predicted_gain", "bytes_saved", "flops_saved"))
    if not LEAST_PREDICTED <= gain <= target.most + 0.0005:  # the prompt gives it rounded
        raise DraftError(
            f"predicted_gain is {gain:g}; for this target it lies between {LEAST_PREDICTED} and {target.most:.3f}"
        )
    if saved < 0 or work < 0 or saved + work == 0:
        raise DraftError("say what the patch saves: bytes_saved or flops_saved above zero, neither below")
    words = (
        f"{hypothesis} Predicted: {saved:.3g} bytes and {work:.3g} FLOPs less a step. If the whole step does not get at least "
        f"{1 + (gain - 1) / 2:.3f} times as fast (predicted: {gain:.3f}), or held-out evaluations get worse, this is refuted."
    )
    edits = raw.get("edits") or (read_object(tried).get("edits") if tried else None)
    return Proposal(AGENT, target.name, title, words, gain, read_edits(edits, workbench))


def read_edits(raw: Any, workbench: Workbench) -> tuple[Edit, ...]:
    """Each file's whole new text. Raises: DraftError."""
    if not isinstance(raw, list) or not raw:
        raise DraftError("edits is a list of at least one edit")
    if len(raw) > MOST_EDITS:
        raise DraftError(f"{len(raw)} edits; at most {MOST_EDITS} are allowed")
    texts: dict[str, str] = {}
    for count, edit in enumerate(raw, 1):
        if not isinstance(edit, dict):
            raise DraftError(f"edit {count} is not an object")
        path = text(edit, "path", f"edit {count}: ")
        if len(path) > 200 or not path.isascii() or not path.isprintable():
            raise DraftError(
                f"edit {count}: the path is not printable ASCII of at most 200 characters: {one_line(ascii(path), 120)}"
            )
        if ("new_text" in edit) == ("find" in edit):
            raise DraftError(f"edit {count}: give either new_text, or find and replace")
        if "new_text" in edit:
            texts[path] = text(edit, "new_text", f"edit {count}: ")
            continue
        find, replace = (text(edit, key, f"edit {count}: ") for key in ("find", "replace"))
        before = texts[path] if path in texts else _read(workbench, path, count)
        times = before.count(find) if find else 0
        if times != 1:
            raise DraftError(f"edit {count}: 'find' occurs {times} times in {path}, it must occur exactly once")
        texts[path] = before.replace(find, replace)
    return tuple(Edit(path, whole) for path, whole in texts.items())


def _read(workbench: Workbench, path: str, count: int) -> str:
    try:
        return workbench.read(path)
    except ReadError as error:
        raise DraftError(f"edit {count}: {one_line(str(error), 200)}") from None
