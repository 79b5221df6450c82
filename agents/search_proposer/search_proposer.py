"""The proposer that needs no language model: it chooses a faster registered implementation for the hottest kernel ops.

Each implementation of an op that runs on the device is timed alone against the one in use, on the recipe's shapes. The step's predicted time
follows by Amdahl's law: each call saves (1 − 1/ratio) of the time of the implementation in use. The hypothesis names the profile's fusion
candidates that a change covers. Two keys of the recipe change no result and are tried too: ``compile``, and the rows of a micro-batch if
seconds for measuring are left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agents.core.proposal import Edit, Proposal
from agents.core.workbench import Measurement, MeasurementError, UnreadableFileError, Workbench
from agents.core.yaml_edit import change_recipe_value, set_yaml_value
from kernels.contract.choice import list_auto_ops, read_device_section
from kernels.contract.message import Message
from trainer.contract.errors import RecipeError

AGENT = "search"
POLICY = "policies/kernels.yaml"
LEAST_GAIN = 1.02  # a smaller predicted gain of the whole step is too small for the gate to measure
LEAST_SHARE = 0.02  # of the step's time: an op with a smaller share cannot reach that gain
MOST_MEASURED = 8  # implementations measured for each proposal, hottest ops first
REFUSED = ("reject",)  # a proposal that was held for lack of evidence may be tried again
LEAST_MICRO_SHARE = 0.05  # of the step: ops with a smaller share are not measured with other rows
MOST_MICRO_OPS = 3
Fusion = Mapping[str, Any]  # one of profile.json's ``fusion_candidates``
NAMED = 3
# Lines of these files outside of ops are compiled with their block.
BLOCKS = ("trainer/model/block.py:", "trainer/model/attention.py:")


@dataclass(frozen=True)
class MeasuredCandidate:
    """An implementation that was measured, and the gain of the whole step that follows."""

    op: str
    before: str
    after: str
    about: str
    share: float  # of the recipe's step that the op takes now
    measured: Measurement
    predicted_gain: float


def propose_implementations(profile: Mapping[str, Any], workbench: Workbench, count: int = 1) -> list[Proposal]:
    """Up to ``count`` proposals, the best of each target, largest predicted gain first. ``profile`` is a parsed profile.json.

    An op that is ``auto`` in kernels.yaml is left out: 'factory tune' chose the fastest implementation for it. A patch that the gate
    rejected, by the workbench's history, is not proposed again.
    """
    policy = workbench.read(POLICY)
    device = profile["device_kind"]
    tuned = list_auto_ops(read_device_section(policy, device))
    untuned = {**profile, "ops": [op for op in profile["ops"] if op["op"] not in tuned]}
    drafts = [
        write_proposal(candidate, profile, policy, device)
        for candidate in measure_candidates(untuned, workbench, MOST_MEASURED * count)
    ]
    knobs = [propose_compiled_blocks(profile, workbench, AGENT), propose_micro_batch(profile, workbench, AGENT)]
    best: dict[str, Proposal] = {}
    for proposal in sorted([*drafts, *filter(None, knobs)], key=lambda p: -p.predicted_gain):
        if proposal.predicted_gain < LEAST_GAIN or len(best) == count:
            break
        tried = workbench.list_earlier_proposals(proposal.target)
        refused = [attempt.patch_id for attempt in tried if attempt.outcome in REFUSED]
        if proposal.patch_id not in refused and not any(attempt.closed for attempt in tried):
            best.setdefault(proposal.target, proposal)
    return list(best.values())


def measure_candidates(
    profile: Mapping[str, Any], workbench: Workbench, most: int = MOST_MEASURED
) -> list[MeasuredCandidate]:
    """Measure up to ``most`` implementations of the hottest ops; those that cannot be measured are left out."""
    step = profile["recipe_step_s"] or profile["eager_step_s"]
    found: list[MeasuredCandidate] = []
    seconds_now: dict[str, float] = {}
    tried = 0
    for op in sorted(profile["ops"], key=lambda o: -o["share"]):
        if op["share"] < LEAST_SHARE:
            continue
        for name, about in op["implementations"].items():
            if name == op["implementation"] or tried >= most:
                continue
            if name == "compiled" and profile["recipe"]["compile"] and op["in_block"]:
                continue  # the recipe compiles the op already, with its block
            tried += 1
            try:
                measured = workbench.measure(op["op"], name, op["implementation"])
            except MeasurementError:
                continue
            # If the recipe compiles, the shares of an eager profile do not hold. The op's time in the step is its time alone, times its calls.
            # All candidates of an op use one time of the current implementation, so that its noise does not rank them.
            now = seconds_now.setdefault(op["op"], measured.against_seconds)
            # The optimiser is not compiled with the model: it takes the same time in the recipe's step as in the eager one.
            share = op["share"]
            if profile["recipe"]["compile"] and not profile.get("compiled"):
                share = op["calls"] * now / step if op["trained"] else share * profile["eager_step_s"] / step
            share = min(share, 0.9)
            found.append(
                MeasuredCandidate(
                    op["op"],
                    op["implementation"],
                    name,
                    about,
                    share,
                    measured,
                    compute_amdahl_speedup(share, measured.ratio),
                )
            )
    return found


def compute_amdahl_speedup(share: float, ratio: float) -> float:
    """Time before over time after, when ``share`` of it becomes ``ratio`` times as fast."""
    return 1.0 / (1.0 - share + share / ratio)


def write_proposal(candidate: MeasuredCandidate, profile: Mapping[str, Any], policy: str, device: str) -> Proposal:
    """The proposal of a candidate: its texts and its one edited line."""
    c, m = candidate, candidate.measured
    hot = [line for line in profile["lines"] if line["op"] == c.op][:3]
    where = ", ".join(f"{line['file']}:{line['line']}" for line in hot)
    covered = find_fusions_of_op(profile, c.op)
    covers = _covers(covered) if covered else ""
    hypothesis = Message(
        "search_proposer.implementation",
        "{op} takes {share:.0%} of the training step (slowest lines: {lines}). On the recipe's shapes, forward "
        "and backward take {after_ms:.1f} ms with `{after}` ({about}) and {before_ms:.1f} ms with `{before}`. "
        "When both run in alternation, `{after}` is {ratio:.2f} times as fast. {covers}{refuted}",
        op=c.op,
        share=c.share,
        lines=where,
        after=c.after,
        about=c.about,
        after_ms=m.seconds * 1e3,
        before=c.before,
        before_ms=m.against_seconds * 1e3,
        ratio=m.ratio,
        covers=covers,
        refuted=_refuted(c.predicted_gain),
    )
    return Proposal(
        agent=AGENT,
        target=f"kernel:{c.op}",
        title=f"{c.op}: {c.before} → {c.after} on {device}",
        hypothesis=hypothesis,
        predicted_gain=c.predicted_gain,
        edits=(Edit(POLICY, set_yaml_value(policy, (device, c.op), c.after)),),
    )


def _covers(fusions: Sequence[Fusion]) -> Message:
    return Message(
        "search_proposer.covers",
        "This implementation covers these fusion candidates of the profile: {fusions}. ",
        fusions=format_fusions(fusions),
    )


def _refuted(gain: float) -> Message:
    """The measurement that would refute a predicted gain of the whole step."""
    return Message(
        "search_proposer.refuted",
        "The prediction is refuted if the whole step is less than {least:.3f} times as fast as before "
        "(predicted: {gain:.3f} times), or if held-out evaluations get worse.",
        least=1 + (gain - 1) / 2,
        gain=gain,
    )


# -- keys of the recipe --------------------------------------------------------------------------------------------------
def find_fusions_of_op(profile: Mapping[str, Any], op: str) -> list[Fusion]:
    """The candidates with all lines in that op, which another implementation covers. Largest gain first."""
    return [f for f in profile.get("fusion_candidates", ()) if {_op(line) for line in f["lines"]} == {op}]


def find_fusions_of_blocks(profile: Mapping[str, Any]) -> list[Fusion]:
    """The candidates that compiled blocks cover. Largest gain first."""
    in_block = {op["op"]: op["in_block"] for op in profile["ops"]}
    inside = lambda line: in_block.get(_op(line), False) if _op(line) else line.startswith(BLOCKS)
    return [f for f in profile.get("fusion_candidates", ()) if all(inside(line) for line in f["lines"])]


def _op(line: str) -> str:
    return line.partition("#")[2]


def format_fusions(fusions: Sequence[Fusion]) -> str:
    """The largest candidates by name, and the number of the others."""
    named = [
        f"{' → '.join(f['lines'])} ({f['bytes_saved'] / 1e6:,.0f} MB, {f['gain_s'] * 1e3:.1f} ms)"
        for f in fusions[:NAMED]
    ]
    more = f"; and {len(fusions) - NAMED} more" if len(fusions) > NAMED else ""
    return "; ".join(named) + more


def propose_compiled_blocks(profile: Mapping[str, Any], workbench: Workbench, agent: str) -> Proposal | None:
    """A proposal of ``compile: true``, for a recipe that runs its blocks eagerly and whose profile has fusion candidates in them.

    The prediction is the candidates' bytes at the measured bandwidth; saved launches are not counted.
    """
    recipe, fusions = profile["recipe"], find_fusions_of_blocks(profile)
    if recipe["compile"] or not fusions:
        return None
    path = f"policies/recipes/{recipe['name']}.yaml"
    try:
        changed = set_yaml_value(workbench.read(path), ("compile",), True)
    except (UnreadableFileError, ValueError):
        return None  # the recipe is the workspace's own: no patch of the repository changes it
    share = min(0.9, sum(f["gain_share"] for f in fusions))
    gain = 1 / (1 - share)
    megabytes = sum(f["bytes_saved"] for f in fusions) / 1e6
    return Proposal(
        agent=agent,
        target="recipe:compile",
        title=Message(
            "search_proposer.compile_title", "recipe {recipe}: compile the model's blocks", recipe=recipe["name"]
        ),
        hypothesis=Message(
            "search_proposer.compile",
            "torch.compile of each block covers {candidates:,|fusion candidate|fusion candidates} of the "
            "profile. Together they would save {megabytes:,.0f} MB of memory traffic and {share:.0%} of the "
            "eager step: {fusions}. {refuted}",
            candidates=len(fusions),
            megabytes=megabytes,
            share=share,
            fusions=format_fusions(fusions),
            refuted=_refuted(gain),
        ),
        predicted_gain=gain,
        edits=(Edit(path, changed),),
    )


def propose_micro_batch(profile: Mapping[str, Any], workbench: Workbench, agent: str) -> Proposal | None:
    """A proposal of the recipe's key ``batch.micro_sequences``: how many rows of a step go through the model at once. None if no other
    number of rows gains, or if none can be measured.

    The key changes only rounding and the use of caches. The hottest ops are measured with half as many rows and with twice as many; the time of
    the rest of the step is assumed to stay.
    """
    recipe = profile["recipe"]
    batch = recipe.get("batch") or {}
    whole = batch.get("sequences", 1)
    now = batch.get("micro_sequences") or whole
    path = f"policies/recipes/{recipe.get('name')}.yaml"
    others = [rows for rows in (now // 2, 2 * now) if 0 < rows <= whole and whole % rows == 0]
    if not others:
        return None
    try:
        text = workbench.read(path)
        gains = {rows: _gain(profile, workbench, now, rows) for rows in others}
        best = max(gains, key=lambda rows: gains[rows])
        edited, _ = change_recipe_value(text, ("batch", "micro_sequences"), best if best < whole else None)
    except (MeasurementError, UnreadableFileError, RecipeError):
        return None  # no seconds left; a recipe of the workspace's own; one that cannot be edited in place
    if gains[best] <= 1:
        return None
    return Proposal(
        agent=agent,
        target="recipe:micro_sequences",
        title=Message(
            "search_proposer.rows",
            "recipe {recipe}: micro-batches of {rows} rows instead of {before}",
            recipe=recipe["name"],
            rows=best,
            before=now,
        ),
        hypothesis=Message(
            "search_proposer.micro_batches",
            "The slowest ops, timed outside the training step, process a step's rows faster in micro-batches of {rows} "
            "rows than in micro-batches of {before} rows. {refuted}",
            rows=best,
            before=now,
            refuted=_refuted(gains[best]),
        ),
        predicted_gain=gains[best],
        edits=(Edit(path, edited),),
    )


def _gain(profile: Mapping[str, Any], workbench: Workbench, now: int, rows: int) -> float:
    """The step's time before divided by its time after, by Amdahl's law over the hottest ops. Raises: MeasurementError."""
    hot = [
        op
        for op in sorted(profile["ops"], key=lambda op: -op["share"])
        if op["trained"] and op["share"] >= LEAST_MICRO_SHARE
    ]
    left = 1.0
    for op in hot[:MOST_MICRO_OPS]:
        each = [
            workbench.measure(op["op"], op["implementation"], op["implementation"], n).seconds / n for n in (now, rows)
        ]
        left += op["share"] * (each[1] / each[0] - 1)
    return 1 / max(left, 0.1)
