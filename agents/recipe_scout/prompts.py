"""The instructions of the recipe scout's language model, its tools, and its view of the record.

A separate file, because people edit these words without the code around them.
"""

from __future__ import annotations

from collections.abc import Sequence

from agents.loop.prompts import MATERIAL
from agents.loop.tools import NUMBER, PROPOSE, READING, TEXT, make_tool
from agents.recipe_scout.training_record import TrainingRecord

MOST_CHANGES = 3  # of one proposal: the effects of many changes cannot be separated

RULES = f"""You are the recipe scout of a factory that trains language models without ever stopping. You make the model learn more from the
same tokens by changing one value of its recipe, or up to {MOST_CHANGES} that belong together (such as the batch and the rate).

How you work: read the record of the trunk and what was tried before; then call `propose` once with the changed values, a hypothesis that
a measurement can refute, and the gain that you predict. When it is not valid you learn why, and may propose again, a few times.

How a change is judged, by measurements it cannot touch: from the trunk's last checkpoint the recipe as it is and as proposed are
trained on the same data, a pair of runs for each of several fresh seeds, each ended by an anneal to a rate of zero. Then held-out
documents are scored in bits per byte. The mean gain over domains must be shown with confidence, exceed what other seeds alone make,
cost no domain more than a margin, and neither memory nor tokens per second beyond a bound. Each further try on the same keys needs
more confidence: propose what you expect to work, not what might.

A change that only helps the first steps after it, or that trades one domain for another, will not be kept. Tokens trained on are what
counts, not steps: half the batch gets twice the steps."""
SYSTEM = f"{RULES}\n\n{MATERIAL}"


def make_task_message(
    record: TrainingRecord, keys: Sequence[str], required_key: str, evidence: str, rounds: int
) -> str:
    """The first message: what may be changed, how long it is judged, and the evidence."""
    wanted = f"One of the changed keys must be {required_key}.\n" if required_key else ""
    return (
        f"Recipe: {record.path}, at step {record.step} of its trunk, after {record.tokens:.3g} positions. Each of the gate's runs has about "
        f"{record.judged_tokens:.3g} more. A mean gain below {record.least_gain:g} bits per byte is not kept: predict at least that.\n"
        f"{wanted}Keys that may be changed: {', '.join(keys)}.\nYou have {rounds} proposals.\n\n{evidence}"
    )


CHANGE = {
    "type": "object",
    "properties": {"key": TEXT, "value": {"type": ["number", "string"]}},
    "required": ["key", "value"],
}
TOOLS = (
    *READING,
    make_tool("record", "The trunk's course: losses, gradients, anomalies, slopes."),
    make_tool("ideas", "Changes that simple rules suggest, with the gain that they predict."),
    make_tool("earlier_proposals", "Which changes were tried before, and why they were kept or not."),
    make_tool(
        PROPOSE,
        "Propose the change.",
        ("changes", "hypothesis", "predicted_gain"),
        changes={"type": "array", "items": CHANGE},
        hypothesis=TEXT | {"description": "what the record shows, what the change does to learning, what follows"},
        predicted_gain=NUMBER | {"description": "bits per byte on held-out documents, such as 0.01"},
    ),
)


def format_training_record(record: TrainingRecord) -> list[str]:
    """The trunk's course as the model reads it."""
    slopes = ", ".join(f"{name} {slope:.3f}" for name, slope in record.domain_slopes.items())
    scale = f"{record.noise_scale:,.0f}" if record.noise_scale else "not measured"
    return [
        f"bits per byte that the loss falls by for e times the tokens: {record.slope:.3f}; by domain: {slopes}",
        f"gradient noise scale: {scale} supervised tokens; a step has {record.supervised:,.0f}",
        f"{record.clipped:.0%} of the later steps were clipped; the z-loss is {record.z_share:.2%} of the loss",
        f"anomalies that a lower rate may avoid: {record.trouble}",
        *record.sample,
    ]
