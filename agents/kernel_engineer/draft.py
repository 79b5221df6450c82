"""Reads the model's answer as a ``Proposal``. The answer is untrusted: every text of it is cut to a limit and cleaned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agents.core.proposal import Edit, Proposal
from agents.core.untrusted import fold_to_one_line
from agents.core.workbench import UnreadableFileError, Variant, Workbench
from agents.kernel_engineer.targets import ProfileTarget
from agents.loop.role import DraftError, parse_arguments, read_number, read_text, read_title_and_hypothesis
from kernels.contract.message import Message

AGENT = "kernel-engineer"
MOST_EDITS = 32
MOST_VARIANTS = 8  # of one call of try_patch
MOST_NAME = 40  # characters of a variant's name
LEAST_PREDICTED = 1.005  # no measurement of the gate could refute a smaller gain


def read_draft(arguments: str, target: ProfileTarget, workbench: Workbench, tried: Sequence[str] = ()) -> Proposal:
    """The proposal that a call of ``propose`` makes. Without edits, it has those of the variant that the call names, or of the only variant of the
    last ``try_patch``. ``tried``: the arguments of all calls of ``try_patch``, oldest first. Raises: DraftError."""
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
    edits = raw.get("edits") or _find_tried_edits(raw.get("variant"), tried)
    return Proposal(AGENT, target.name, title, words, gain, read_edits(edits, workbench))


def _find_tried_edits(wanted: Any, tried: Sequence[str]) -> Any:
    """The edits of a tried variant, not read yet. ``wanted``: its name, or nothing for the only variant of the last call. Raises: DraftError."""
    name = fold_to_one_line(wanted, MOST_NAME) if isinstance(wanted, str) else wanted and repr(wanted)
    for arguments in reversed(tried):
        try:
            call = parse_arguments(arguments)
            named = _name_variants(call.get("variants"), call.get("edits"))
        except DraftError:
            continue
        if name and name in named:
            return named[name]
        if not name and len(named) > 1:
            raise DraftError(
                "kernel_engineer.which_variant",
                "Name one of the variants that you tried, as variant: {names}.",
                names=list(named),
            )
        if not name:
            return next(iter(named.values()))
    if name:
        raise DraftError(
            "kernel_engineer.unknown_variant", "No variant {name!r} was tried.", name=fold_to_one_line(name, MOST_NAME)
        )
    return None


def _name_variants(variants: Any, edits: Any) -> dict[str, Any]:
    """The raw edits of each variant by its name, of a call of ``try_patch``. Names that are missing or repeated get a number. Raises: DraftError."""
    given = [{"name": "", "edits": edits}] if variants is None else variants
    if not isinstance(given, list) or not given:
        raise DraftError("kernel_engineer.no_variants", "variants must be a list of at least one variant.")
    if len(given) > MOST_VARIANTS:
        raise DraftError(
            "kernel_engineer.too_many_variants",
            "There are {variants} variants. At most {most} are allowed in one call.",
            variants=len(given),
            most=MOST_VARIANTS,
        )
    named: dict[str, Any] = {}
    for number, one in enumerate(given, 1):
        said = one.get("name") if isinstance(one, dict) else None
        name = fold_to_one_line(said, MOST_NAME) if isinstance(said, str) else ""
        name = name if name and name not in named else f"variant {number}"
        while name in named:
            name += "'"
        named[name] = one.get("edits") if isinstance(one, dict) else None
    return named


def read_variants(variants: Any, edits: Any, workbench: Workbench) -> dict[str, Variant | str]:
    """The variants of a call of ``try_patch`` by name; in place of one that cannot be read, the problem. ``edits``: a single variant.

    Raises: DraftError if there is no list of variants.
    """
    found: dict[str, Variant | str] = {}
    for name, raw in _name_variants(variants, edits).items():
        try:
            found[name] = Variant(name, read_edits(raw, workbench))
        except DraftError as error:
            found[name] = Message(
                "kernel_engineer.unreadable_variant", "the edits cannot be read: {problem}", problem=error.message
            )
    return found


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
