"""Checks before the first step that the data is enough for the planned steps, and that packing stays under the allowed padding."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.contract.data.data_order import DataOrder
from trainer.contract.errors import DataPlanError
from trainer.contract.recipe import Recipe

REHEARSED = (
    64  # steps that are packed to measure their padding; the first half chooses from fresh pieces, and is not counted
)


@dataclass(frozen=True)
class PackingRehearsal:
    """The result of packing some steps in advance."""

    first_step: int
    positions: int
    used: int  # number of positions that hold a token

    @property
    def padding_share(self) -> float:
        """The share of empty positions."""
        return 1 - self.used / self.positions


def rehearse_packing(order: DataOrder, step: int, last_step: int) -> PackingRehearsal | None:
    """Pack the steps from ``step`` on as if they came next, without moving ``order``. Only the later half is counted.

    None if the data ends before that half.
    """
    order, stop = order.copy_at_step(step), min(step + REHEARSED, last_step)
    positions = used = 0
    while order.step < stop:
        try:
            rows = order.draw_next_rows()
        except DataPlanError:
            break
        if order.step > (step + stop) // 2:
            positions += len(rows) * order.context
            used += sum(piece.positions for row in rows for piece in row)
    return PackingRehearsal(step, positions, used) if positions else None


def refuse_impossible_run(order: DataOrder, recipe: Recipe, first_step: int, last_step: int) -> None:
    """Raises: DataPlanError that names the key, if the steps from ``order`` on have too little data or too much padding."""
    if (
        order.step == first_step
    ):  # a segment that was begun is not refused when it continues, although other steps are rehearsed then
        refuse_excessive_padding(order, recipe, last_step)
    steps, wanted = last_step - order.step, recipe.count_tokens_between(order.step, last_step)
    left = order.count_positions_until(last_step, recipe.count_tokens_between)
    if left < wanted * 0.99 and (rehearsal := rehearse_packing(order, order.step, last_step)):
        used = rehearsal.used / rehearsal.positions  # padding needs no data
        wanted = round(wanted * used)
        left = order.count_positions_until(
            last_step, lambda first, last: round(recipe.count_tokens_between(first, last) * used)
        )
    if left < wanted * 0.99:
        raise DataPlanError(
            "plan.too_little_data",
            "max_epochs: {steps} steps of {step_tokens} tokens need {needed} tokens, but with max_epochs "
            "{max_epochs} the data has only {left} tokens left. Add shards, raise max_epochs or plan fewer steps.",
            steps=steps,
            step_tokens=recipe.tokens_per_step,
            needed=wanted,
            left=left,
            max_epochs=order.plan.max_epochs,
        )


def refuse_excessive_padding(order: DataOrder, recipe: Recipe, last_step: int) -> None:
    """Raises: DataPlanError if a coming batch size or mixture pads more than ``batch.max_padding`` allows."""
    most = recipe.batch.max_padding
    if most is None:
        return
    changes = {mixture.start for mixture in order.plan.list_mixtures()} | {s.until_step for s in recipe.batch.warmup}
    for step in sorted({order.step} | {step for step in changes if order.step < step < last_step}):
        rehearsal = rehearse_packing(order, step, last_step)
        if rehearsal is not None and rehearsal.padding_share > most:
            longest = max(stream.longest - 1 for stream in order.streams.values())
            raise DataPlanError(
                "plan.padding",
                "batch.max_padding: from step {step} on, batch.packing ({packing}) leaves {padding:.2%} of the positions empty, but at most "
                "{most:.2%} may be empty. The longest piece of a document has {longest} positions, and a row has {context} positions "
                "(model.context). Shorten model.context, raise batch.max_padding, or set batch.packing to truncate-and-concatenate.",
                most=most,
                step=step,
                packing=recipe.batch.packing,
                padding=rehearsal.padding_share,
                longest=longest,
                context=order.context,
            )
