"""What a person asks of a daemon that runs ('judge 3'): it is done once, after what is half done and before what lasts."""

from __future__ import annotations

from collections.abc import Iterator

from factory.core.errors import InputError
from factory.duties.duty import Duty, Errand, Look, always
from factory.ledger.plant import Plant
from factory.retrying.asking import answer, asked


def _asked(look: Look) -> list[Errand]:
    """What starts no trainer first, the oldest first."""
    return sorted(_errands(look), key=lambda errand: errand.duty.trains)


def _errands(look: Look) -> Iterator[Errand]:
    for words, one in asked(look.db).items():
        how = {key: value for key, value in one.items() if key not in ("action", "by", "at", "event") and value is not None}
        try:
            yield Errand.parse(words, look.duties, how)
        except InputError:
            yield Errand(REFUSE, words)


def _refuse(plant: Plant, words: str) -> None:
    try:
        Errand.parse(words, ())
    except InputError as error:
        plant.say(f"  {error}")
    if one := asked(plant.ledger).get(words):
        answer(plant.ledger, words, one["event"])


REFUSE = Duty("refuse", "say that what was asked for is no duty", always, _refuse)
ASKED = Duty("asked", "do what a person asked for", _asked, lambda plant, subject: None, fills_disk=True)
