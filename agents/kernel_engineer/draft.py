"""Reads the model's answer as a ``Proposal``. The answer is untrusted: every text of it is cut to a limit and cleaned."""

from __future__ import annotations

from typing import Any

from agents.core.proposal import Edit, Proposal
from agents.core.untrusted import fold_to_one_line
from agents.core.workbench import UnreadableFileError, Workbench
from agents.kernel_engineer.targets import ProfileTarget
from agents.loop.role import DraftError, parse_arguments, read_number, read_text, read_title_and_hypothesis
from kernels.contract.message import Message

AGENT = "kernel-engineer"
MOST_EDITS = 32
LEAST_PREDICTED = 1.005  # no measurement of the gate could refute a smaller gain


def read_draft(arguments: str, target: ProfileTarget, workbench: Workbench, tried: str = "") -> Proposal:
    """The proposal that a call of ``propose`` makes, with the edits of the last ``try_patch`` if the call has none. Raises: DraftError."""
    raw = parse_arguments(arguments)
    title, hypothesis = read_title_and_hypothesis(raw)
    gain, saved, work = (read_number(raw, key) for key in ("predicted_gain", "bytes_saved", "flops_saved"))
    if not LEAST_PREDICTED <= gain <= target.largest_possible_gain + 0.0005:  # the prompt gives the limit rounded
        raise DraftError(
            "kernel_engineer.gain_out_of_range",
            "predicted_gain is {gain:g}, but for this target it must lie between {least} and {most:.3f}.",
            gain=gain,
            least=LEAST_PREDICTED,
            most=target.largest_possible_gain,
        )
    if saved < 0 or work < 0 or saved + work == 0:
        raise DraftError(
            "kernel_engineer.saves_nothing",
            "Say what the patch saves: at least one of bytes_saved and flops_saved must be above zero, and neither may be "
            "negative.",
        )
    words = Message(
        "kernel_engineer.hypothesis",
        "{hypothesis} Prediction: each step moves {bytes:.3g} bytes less and computes {flops:.3g} FLOPs less. "
        "The prediction is refuted if the whole step is less than {least:.3f} times as fast as before "
        "(predicted: {gain:.3f} times), or if held-out evaluations get worse.",
        hypothesis=hypothesis,
        bytes=saved,
        flops=work,
        least=1 + (gain - 1) / 2,
        gain=gain,
    )
    edits = raw.get("edits") or (parse_arguments(tried).get("edits") if tried else None)
    return Proposal(AGENT, target.name, title, words, gain, read_edits(edits, workbench))


def read_edits(raw: Any, workbench: Workbench) -> tuple[Edit, ...]:
    """The edits, each with its file's whole new text. Raises: DraftError."""
    if not isinstance(raw, list) or not raw:
        raise DraftError("kernel_engineer.no_edits", "edits must be a list of at least one edit.")
    if len(raw) > MOST_EDITS:
        raise DraftError(
            "kernel_engineer.too_many_edits",
            "There are {edits} edits. At most {most} are allowed.",
            edits=len(raw),
            most=MOST_EDITS,
        )
    texts: dict[str, str] = {}
    for count, edit in enumerate(raw, 1):
        if not isinstance(edit, dict):
            raise DraftError("kernel_engineer.not_an_edit", "edit {number} is not an object.", number=count)
        path = read_text(edit, "path", f"edit {count}: ")
        if len(path) > 200 or not path.isascii() or not path.isprintable():
            raise DraftError(
                "kernel_engineer.wrong_path",
                "edit {number}: the path {path} is not printable ASCII of at most 200 characters.",
                number=count,
                path=fold_to_one_line(ascii(path), 120),
            )
        if ("new_text" in edit) == ("find" in edit):
            raise DraftError(
                "kernel_engineer.two_forms",
                "edit {number} must have either new_text, or both find and replace.",
                number=count,
            )
        if "new_text" in edit:
            texts[path] = read_text(edit, "new_text", f"edit {count}: ")
            continue
        find, replace = (read_text(edit, key, f"edit {count}: ") for key in ("find", "replace"))
        before = texts[path] if path in texts else _read(workbench, path, count)
        times = before.count(find) if find else 0
        if times != 1:
            raise DraftError(
                "kernel_engineer.not_once",
                "edit {number}: 'find' occurs {times:,|time|times} in {path}. It must occur exactly once.",
                number=count,
                times=times,
                path=path,
            )
        texts[path] = before.replace(find, replace)
    return tuple(Edit(path, whole) for path, whole in texts.items())


def _read(workbench: Workbench, path: str, count: int) -> str:
    try:
        return workbench.read(path)
    except UnreadableFileError as error:
        raise DraftError(
            "kernel_engineer.unreadable",
            "edit {number}: {problem}",
            number=count,
            problem=fold_to_one_line(str(error), 200),
        ) from None
