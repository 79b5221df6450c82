"""Checks before the first step: is there data enough for the planned steps, and does packing stay under the allowed padding?"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.contract.data.data_order import DataOrder
from trainer.contract.errors import DataPlanError
from trainer.contract.recipe import Recipe

REHEARSED = (
    64  # steps that are packed to see how they pad; the first ones choose from fresh pieces, and are not counted
)


@dataclass(frozen=True)
class Rehearsal:
    """How some steps would be filled."""

    first_step: int
    positions: int
    used: int  # of these, those that hold a token

    @property
    def padding(self) -> float:
        """The share that holds nothing."""
        return 1 - self.used / self.positions


def rehearse(order: DataOrder, step: int, last_step: int) -> Rehearsal | None:
    """Pack the steps from ``step`` on as if they came next, without moving ``order``; the later half is counted.

    None when the data ends before.
    """
    order, stop = order.fork(step), min(step + REHEARSED, last_step)
    positions = used = 0
    while order.step < stop:
        try:
            rows = order.next_rows()
        except DataPlanError:
            break
        if order.step > (step + stop) // 2:
            positions += len(rows) * order.context
            used += sum(piece.positions for row in rows for piece in row)
    return Rehearsal(step, positions, used) if positions else None


def refuse_impossible(order: DataOrder, recipe: Recipe, first_step: int, last_step: int) -> None:
    """Raises: DataPlanError naming the key, when the plan cannot feed or fill the steps from where ``order`` stands."""
    if order.step == first_step:  # what was begun is not refused when it goes on: other steps are rehearsed then
        refuse_padding(order, recipe, last_step)
    steps, wanted = last_step - order.step, recipe.tokens_between(order.step, last_step)
    left = order.positions_until(last_step, recipe.tokens_between)
    if left < wanted * 0.99 and (rehearsal := rehearse(order, order.step, last_step)):
        used = rehearsal.used / rehearsal.positions  # padding needs no data
        wanted = round(wanted * used)
        left = order.positions_until(last_step, lambda first, last: round(recipe.tokens_between(first, last) * used))
    if left < wanted * 0.99:
        raise DataPlanError(
            f"max_epochs: {steps} steps of {recipe.tokens_per_step} tokens need {wanted} tokens, the "
            f"data has {left} under max_epochs {order.plan.max_epochs}: add shards, raise max_epochs or plan fewer steps"
        )


def refuse_padding(order: DataOrder, recipe: Recipe, last_step: int) -> None:
    """Raises: DataPlanError naming ``batch.max_padding``, when a batch size or mixture to come pads more than it allows."""
    most = recipe.batch.max_padding
    if most is None:
        return
    changes = {mixture.start for mixture in order.plan.mixtures()} | {s.until_step for s in recipe.batch.warmup}
    for step in sorted({order.step} | {step for step in changes if order.step < step < last_step}):
        rehearsal = rehearse(order, step, last_step)
        if rehearsal is not None and rehearsal.padding > most:
            longest = max(int(stream.length.max()) - 1 for stream in order.streams.values())
            raise DataPlanError(
                f"batch.max_padding ({most}) is exceeded: from step {step} on, batch.packing "
                f"({recipe.batch.packing}) leaves {rehearsal.padding:.2%} of the positions empty, because pieces of "
                f"documents (the longest has {longest} positions) do not fill rows of model.context "
                f"({order.context}) positions: shorten model.context, raise batch.max_padding, or set batch.packing "
                "to truncate-and-concatenate"
            )
