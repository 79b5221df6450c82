"""Combines held patches of separate targets, and has them judged as one patch, their sum.

The gain of one patch may be too small to be seen beside the noise. The gains of several add up, while the noise of a measurement stays. A part must
have passed everything but the clarity of its timing. The gate judges the sum as any patch. The sum counts as a try of each of its parts' targets
(``factory.code_loop.submitting.compute_tries``).

If the sum is merged, its parts are closed as merged with it (``factory.code_loop.approvals``). If it is held or rejected, the parts stay as they are.
The same sum is not made twice. A sum that noise held is itself judged again (``factory.code_loop.judging_again``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from agents.core.proposal import Edit, Proposal
from factory.code_loop.held_proposals import HeldPatch, ProposalDescents, list_held_patches
from factory.code_loop.judging_again import get_held_proposal, move_patch, read_judging_again_rules
from factory.code_loop.submitting import (
    WRITTEN,
    remove_remains_and_get_live_commit,
    submit_proposal,
    write_branch,
)
from factory.computing.tuned_kernels import KERNELS
from factory.core.errors import InputError
from factory.gates.holds import NOISE
from factory.git import repository
from factory.git.scope import AgentsPolicy
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow, SqlReader, Subject
from factory.ledger.writing import record_event_once
from kernels.contract.message import Message

AGENT = "combiner"
TARGET = "sum"  # a sum has the target 'sum:N+M'
REFUSED = "sum_refused"  # event of the first part: {"sum_of", "live", "why"}: these patches do not apply together on this live commit


def find_parts_to_combine(plant: Plant, db: SqlReader) -> tuple[int, ...]:
    """Return the held proposals that the daemon combines now, oldest first; () if there is no sum that was not tried. Raises: ConfigError."""
    held = [one for one in list_held_patches(db, read_judging_again_rules(plant)) if _is_part(one)]
    most = AgentsPolicy.load(plant.workspace.policy_path("agents.yaml")).max_files
    chosen = choose_separate_patches(held, most)
    if len(chosen) < 2 or find_earlier_sum(db, chosen) is not None:
        return ()
    live = repository.get_live_commit(plant.workspace.repository)
    return () if _was_refused(db, chosen, live) else tuple(chosen)


def _is_part(one: HeldPatch) -> bool:
    """Whether a held patch can be a part: only noise held it, it is no sum, and it waits for no sum's decision."""
    return one.cause == NOISE and not one.is_sum and one.in_sum is None


def choose_separate_patches(held: Sequence[HeldPatch], most_files: int) -> list[int]:
    """Return the proposals to combine: the oldest, and each later one with another target and with files that none of them changes.

    Several may choose a kernel in kernels.yaml, because each chooses for its own op. ``most_files``: of the sum.
    """
    chosen: list[int] = []
    files: set[str] = set()
    targets: set[str] = set()
    for one in held:
        own = set(one.files)
        separate = own and one.row.target not in targets and not (own & files) - {KERNELS}
        if separate and len(files | own) <= most_files:
            chosen.append(one.row.number)
            files |= own
            targets.add(one.row.target)
    return chosen


def find_earlier_sum(db: SqlReader, numbers: Iterable[int], failed: bool = True) -> int | None:
    """Return the newest proposal that is the sum of the same patches, or None. ``failed``: sums count that failed before their verdict."""
    descents = ProposalDescents(db)
    wanted = sorted({descents.find_root(number) for number in numbers})
    states = {row["number"]: row["state"] for row in db.read("SELECT number, state FROM proposals")}
    found = [
        number
        for first, parts in descents.list_sums().items()
        if parts == wanted
        for number in descents.list_family(first)
        if number in states and (failed or states[number] != "failed")
    ]
    return max(found, default=None)


def combine_proposals(plant: Plant, numbers: Sequence[int]) -> int:
    """Have the sum of held proposals judged at once, for a person. Returns the sum's number.

    The caller holds the workspace's ``code-loop`` lock. Raises: InputError that says why the proposals cannot be combined; RepositoryError;
    IsolationError.
    """
    numbers = sorted(set(numbers))
    if len(numbers) < 2:
        raise InputError(
            "code_loop.one_part",
            "A sum has at least two different proposals. Name them: 'factory proposals combine N M'.",
        )
    live = remove_remains_and_get_live_commit(plant)
    rows = [get_held_proposal(plant, number, live) for number in numbers]
    known = {one.row.number: one for one in list_held_patches(plant.ledger, read_judging_again_rules(plant))}
    for number in numbers:
        one = known.get(number)
        if one is None or not _is_part(one):
            raise InputError(
                "code_loop.no_part",
                "Proposal {proposal} cannot be part of a sum. A part is held only by noise of the timing, is no sum itself, and is not part of a sum "
                "that waits for its decision. To see it: 'factory proposals show {proposal}'.",
                proposal=number,
            )
    if earlier := find_earlier_sum(plant.ledger, numbers, failed=False):
        row = ProposalRow.get(plant.ledger, earlier)
        raise InputError(
            "code_loop.sum_exists",
            "The sum of these proposals is proposal {sum} already, with the verdict {outcome}. To see it: 'factory proposals show {sum}'.",
            sum=earlier,
            outcome=(row.outcome or row.state).upper(),
        )
    drafted = draft_sum(plant, rows, live)
    return submit_proposal(plant, drafted, live, {"sum_of": numbers})


def write_sum(plant: Plant, numbers: Sequence[int], live: str) -> int | None:
    """Write the sum of held proposals to a branch, for the daemon, whose next stage judges it. Returns its number; None if the patches do not apply
    together on the live code, which is recorded."""
    try:
        drafted = draft_sum(plant, [get_held_proposal(plant, number, live) for number in numbers], live)
    except InputError as error:
        refusal = {"sum_of": list(numbers), "live": live, "why": str(error)}
        record_event_once(plant.ledger, REFUSED, Subject("proposal", numbers[0]), refusal)
        plant.print_line(
            Message(
                "code_loop.no_sum",
                "  proposals {proposals} cannot be combined now: {problem}",
                proposals=list(numbers),
                problem=error.message,
            )
        )
        return None
    return write_branch(plant, drafted, live, WRITTEN, {"sum_of": list(numbers)})


def draft_sum(plant: Plant, rows: Sequence[ProposalRow], live: str) -> Proposal:
    """Return the sum of judged patches, on top of the live code. Raises: InputError if two have one target, or change the same part of a file."""
    texts: dict[str, str] = {}
    owner: dict[str, int] = {}
    for row in rows:
        if (other := owner.setdefault(f"target {row.target}", row.number)) != row.number:
            raise InputError(
                "code_loop.same_target",
                "Proposals {first} and {second} have the same target ({target}). Combine proposals of separate targets.",
                first=other,
                second=row.number,
                target=row.target,
            )
        changed = move_patch(plant.workspace.repository, row, live)
        for path in sorted(edit.path for edit in changed if edit.path != KERNELS):
            if (other := owner.setdefault(path, row.number)) != row.number:
                raise InputError(
                    "code_loop.same_file",
                    "Proposals {first} and {second} both change {file}, so they cannot be combined. Leave one of them out.",
                    first=other,
                    second=row.number,
                    file=path,
                )
        texts |= {edit.path: edit.new_text for edit in move_patch(plant.workspace.repository, row, live, texts)}
    numbers = [row.number for row in rows]
    gains = [row.predicted_gain for row in rows]
    return Proposal(
        AGENT,
        f"{TARGET}:{'+'.join(map(str, numbers))}",
        Message("code_loop.sum_title", "Combine proposals {parts}", parts=numbers),
        Message(
            "code_loop.sum_hypothesis",
            "Noise of the timing held each of these patches, which change separate files: {parts}. Prediction: together they make the whole step "
            "faster, by the product of their gains. The prediction is refuted if the step with all of them is not faster.",
            parts=[f"{row.number} ({row.title[:80]})" for row in rows],
        ),
        math.prod(gain or 1.0 for gain in gains),
        tuple(Edit(path, text) for path, text in sorted(texts.items())),
    )


def _was_refused(db: SqlReader, numbers: Sequence[int], live: str) -> bool:
    sql = "SELECT detail FROM events WHERE kind = :kind AND subject = :subject"
    told = [row["detail"] for row in db.read(sql, kind=REFUSED, subject=str(Subject("proposal", numbers[0])))]
    return any(one["sum_of"] == list(numbers) and one["live"] == live for one in told)
