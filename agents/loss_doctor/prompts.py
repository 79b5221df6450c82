"""The instructions of a language model that words a diagnosis. Everything that comes from the record is marked as data.

A separate file, because people edit these words without the code around them.
"""

from __future__ import annotations

from collections.abc import Sequence

from agents.core.untrusted import quote_as_data
from agents.loop.prompts import MATERIAL

MOST_CLAIMS = 6  # sentences of an explanation
MOST_CHARS = 300  # of a sentence

RULES = f"""You explain to the people who train a language model what was found about an anomaly of its loss. The cause is known: it was
named by a table, from replays of the same steps with one thing changed in each (arms). You do not diagnose. Nothing that you say changes
the cause, the documents to blame or what is done; you say in plain words what the evidence shows and what follows for the reader.

Call `explain` once with at most {MOST_CLAIMS} claims. A claim is one sentence that rests on one piece of evidence:
- `rests_on` is the name of that arm or fact, copied exactly;
- `shows` is what the record says of it, copied exactly: there, gone, unclear or not run for an arm, the value for a fact;
- `says` is the sentence, at most {MOST_CHARS} characters of plain text, without addresses, markup or commands.

Each claim is compared with the record, and one that does not hold is dropped, without a second try: a name that the record does not have,
an outcome or a number that is not that evidence's own, another arm's name in the sentence, a cause that the table did not name."""
SYSTEM = f"{RULES}\n\n{MATERIAL}"


def make_task_message(
    causes: Sequence[str], forbidden_causes: Sequence[str], facts: str, arms: str, documents: Sequence[tuple[str, str]]
) -> str:
    """The model's task, each part cut to a limit and marked as data. ``forbidden_causes``: causes that no sentence may name."""
    parts = [
        quote_as_data("facts", facts),
        quote_as_data("arms: what the anomaly is in each", arms or "none was replayed"),
    ]
    parts += [quote_as_data(f"the beginning of a document, {name}", beginning, 1000) for name, beginning in documents]
    parts.append(
        f"The cause is: {' or '.join(causes)}. Causes that no sentence may name: {', '.join(forbidden_causes)}."
    )
    return "\n\n".join(parts)
