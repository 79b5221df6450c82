"""What a person asks of a daemon that runs ('judge 3'): it is done once, after what is half done and before what lasts.

Apart because a duty is one file, and one line of the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from factory.core.errors import InputError
from factory.duties.duty import Duty, Errand, Look, always
from factory.ledger.plant import Plant
from factory.retrying.asking import answer, asked


def _asked(look: Look) -> list[Errand]:
    """What starts no trainer first, the oldest first."""
    return sorted(_errands(look), key=lambda errand: errand.duty.trains)


def _errands(look: Look) -> Iterator[Errand]:
    for words, one in asked(look.db).items():
        try:
            yield Errand.parse(words, look.duties)
        except InputError as error:
            yield Errand(Duty("refuse", "", always, partial(_refuse, str(error), one["event"])), words)


def _refuse(why: str, event: int, plant: Plant, words: str) -> None:
    plant.say(f"  {why}")
    answer(plant.ledger, words, event)


ASKED = Duty("asked", "do what a person asked for", _asked, lambda plant, subject: None, fills_disk=True)
