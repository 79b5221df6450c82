"""The table from what the arms showed to a cause: a pure function. Two names, or ``unknown``, are honest answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agents.loss_doctor.arms import AS_BEFORE, COMMIT, EARLIER, ENVIRONMENT, FP32, KERNELS, MICRO, MIXTURE, ORDER

BAD_DATA, DATA_AND_STATE, REPEATED = "bad data", "data × state", "contamination or repeated data"
ORDER_OR_PACKING, RATE, PRECISION, KERNEL = "data order or packing", "rate", "numeric precision", "faulty kernel"
CODE, STATE_LOST, HARDWARE, LAYOUT = "code change", "state lost on resume", "hardware", "layout"
SHARES, LOSS_MASK = "mixture shift or wrong label", "loss mask"
PLATEAU, NEW_GENERATION, UNKNOWN = "true plateau", "new generation", "unknown"
HEALTHY = ((PLATEAU,), (NEW_GENERATION,))  # answers that ask for nothing
NON_FINITE = "non_finite"  # a kind of anomaly that no good documents make
SPREAD = 0.4  # share of a window's documents from which on no single ones are to blame


@dataclass(frozen=True)
class Findings:
    """What is known so far. A dictionary's missing arm was not run; None: the arm neither cleared the anomaly nor showed it."""

    kind: str
    low: bool = False
    fires: Mapping[str, bool | None] = field(default_factory=dict)  # by arm
    repeatable: bool | None = None  # did the same replay, twice, leave the same bits?
    kernels_are_reference: bool = False  # then there is no arm of them
    masked_clears: bool | None = None  # masking all suspects; None: there was none, or it was not tried
    guilty_share: float = 0.0  # of the window's documents, those that must be masked together
    older_fires: bool | None = None  # do they do the same at another checkpoint? None: there is none, or it is unclear
    joined_clears: str = (
        ""  # LOSS_MASK or SHARES: what is odd about documents that joined, where masking them all clears it
    )
    rate_clears: str = ""  # the first arm of the rate that cleared it
    one_rank: bool = False  # is it replayed by another number of ranks than it was trained by?
    resumed: bool = False  # does the newest checkpoint lack the optimiser's moments?
    generation_begins: bool = False  # did new shards join where the anomaly began?
    shards_kind: bool = False  # are documents without which it is gone like many of the shards that joined?
    too_many: bool = False  # is it gone without documents that some of the shards before are like?
    learnt: bool = False  # do documents of those shards stand out no more at the segment's end?
    environment: bool = False  # did it change with the segment?
    strange: bool = False  # does any of the window's documents stand out among those of the shards before?
    finished: bool = False  # no arm is left
    failed: bool = (
        False  # some arm could not be run: what it would have shown is not known, so nothing is called healthy
    )

    def cleared(self, arm: str) -> bool:
        return self.fires.get(arm) is False


@dataclass(frozen=True)
class Naming:
    """One cause, or two that the arms cannot tell apart, and why."""

    causes: tuple[str, ...]
    why: str


Row = tuple[Callable[[Findings], bool], tuple[str, ...], str]

# The first row that holds. A later row may rely on those before it.
TABLE: tuple[Row, ...] = (
    (
        lambda f: f.repeatable is False,
        (HARDWARE,),
        "the same replay, twice, left different bits: a device errs, or the code is not deterministic",
    ),
    (
        lambda f: f.cleared("same again") and f.one_rank,
        (HARDWARE, LAYOUT),
        "the same steps from the same checkpoint do not show it on one rank: a device erred, or the ranks' sharing of the work",
    ),
    (
        lambda f: f.cleared("same again"),
        (HARDWARE,),
        "the same steps from the same checkpoint do not show it: it was no property of data, code or recipe",
    ),
    (
        lambda f: f.cleared(FP32.name) and f.cleared(KERNELS.name),
        (PRECISION, KERNEL),
        "it is gone in fp32, and with the reference kernels",
    ),
    (
        lambda f: f.cleared(FP32.name) and (f.kernels_are_reference or KERNELS.name in f.fires),
        (PRECISION,),
        "it is gone in fp32, and not with the reference kernels",
    ),
    (lambda f: f.cleared(KERNELS.name), (KERNEL,), "it is gone with the reference kernels"),
    (
        lambda f: f.cleared(MICRO),
        (LAYOUT,),
        "it is gone where all rows are one micro-batch: the loss depends on accumulation",
    ),
    (
        lambda f: f.cleared(EARLIER.name) and f.resumed,
        (STATE_LOST,),
        "trained through from an earlier checkpoint it is gone, and the newest one lacks the optimiser's moments",
    ),
    (
        lambda f: f.cleared(MIXTURE.name),
        (SHARES,),
        "it is gone with the shares of the domains that were in force before",
    ),
    (lambda f: f.rate_clears == AS_BEFORE, (RATE,), "it is gone with the optimiser and schedule of the segment before"),
    (lambda f: f.cleared(COMMIT.name), (CODE,), "it is gone with the code of the segment before"),
    (lambda f: f.cleared(ENVIRONMENT.name), (CODE,), "it is gone in the environment of the segment before"),
    (
        lambda f: f.joined_clears == LOSS_MASK,
        (LOSS_MASK,),
        "it is gone without the documents that joined, and other tokens of theirs carry loss than of those before",
    ),
    (
        lambda f: f.joined_clears == SHARES,
        (SHARES,),
        "it is gone without the documents that joined, and they read like another domain's",
    ),
    (
        lambda f: bool(f.masked_clears) and f.guilty_share > SPREAD and f.cleared(ORDER.name),
        (ORDER_OR_PACKING,),
        "it is gone only without so many of the step's documents that no single ones are to blame, and with other ones of the same shards",
    ),
    (
        lambda f: (
            f.learnt
            and not f.low
            and f.kind != NON_FINITE
            and (f.shards_kind or (f.guilty_share > SPREAD and ORDER.name in f.fires))
        ),
        (NEW_GENERATION,),
        "it is gone without documents that are like many of the shards that joined; at the segment's end those stand out no more: they were learnt",
    ),
    (
        lambda f: f.too_many,
        (BAD_DATA, REPEATED),
        "it is gone without documents each of which some of the shards before are like: they are too many at once",
    ),
    (
        lambda f: f.shards_kind and (not f.low or f.older_fires is True),
        (NEW_GENERATION, BAD_DATA),
        "it is gone without documents that are like many of the shards that joined: the shards' kind, and no single documents' fault",
    ),
    (
        lambda f: bool(f.masked_clears) and f.guilty_share > SPREAD and ORDER.name in f.fires,
        (NEW_GENERATION, BAD_DATA),
        "it is gone only without so many of the step's documents that no single ones are to blame; others of these shards do the same",
    ),
    (
        lambda f: bool(f.masked_clears) and f.guilty_share <= SPREAD and f.low and f.older_fires is False,
        (REPEATED,),
        "without some documents the loss is as usual; at an older checkpoint they were not too easy, so they were learnt since",
    ),
    (
        lambda f: bool(f.masked_clears) and f.guilty_share <= SPREAD and f.older_fires is True,
        (BAD_DATA,),
        "it is gone without some documents, and they do the same at another checkpoint",
    ),
    (
        lambda f: bool(f.masked_clears) and f.guilty_share <= SPREAD and f.older_fires is False,
        (DATA_AND_STATE,),
        "it is gone without some documents, and another checkpoint takes the same documents without harm",
    ),
    (
        lambda f: bool(f.masked_clears) and f.finished and f.low,
        (BAD_DATA, REPEATED),
        "it is gone without some documents, and no second checkpoint says whether they were always too easy",
    ),
    (
        lambda f: bool(f.masked_clears) and f.finished,
        (BAD_DATA, DATA_AND_STATE),
        "it is gone without some documents, and no second checkpoint says whether they do the same there",
    ),
    (
        lambda f: f.cleared(ORDER.name) and not f.masked_clears,
        (ORDER_OR_PACKING,),
        "no documents stand out that it is gone without, and it is gone with other ones of the same shards",
    ),
    (
        lambda f: f.cleared(EARLIER.name),
        (STATE_LOST, HARDWARE),
        "trained through from an earlier checkpoint it is gone: the newest checkpoint holds something wrong",
    ),
    (lambda f: bool(f.rate_clears), (RATE,), "no document is to blame, and a smaller step of the optimiser clears it"),
    (
        lambda f: f.finished and f.environment and ENVIRONMENT.name not in f.fires,
        (CODE, UNKNOWN),
        "no arm cleared it, and the environment changed with the segment; the one before is not at hand",
    ),
    (
        lambda f: (
            f.finished
            and not f.failed
            and f.generation_begins
            and not f.low
            and f.strange
            and not f.learnt
            and f.kind != NON_FINITE
        ),
        (NEW_GENERATION, BAD_DATA),
        "it began as new shards joined and nothing clears it, but documents stand out among those before: the shards may be mostly bad",
    ),
    (
        lambda f: f.finished and not f.failed and f.generation_begins and not f.low and f.kind != NON_FINITE,
        (NEW_GENERATION,),
        "it began as new shards joined, nothing clears it, and no document stands out, or none does any more at the segment's end",
    ),
    (
        lambda f: f.finished and not f.failed and f.kind == "plateau",
        (PLATEAU,),
        "nothing that was tried makes the loss fall",
    ),
    (lambda f: f.finished, (UNKNOWN,), "no arm cleared it"),
)


def name(findings: Findings) -> Naming | None:
    """The cause, as soon as the findings are enough for one; always once they are ``finished``.

    >>> name(Findings("loss_spike", repeatable=False)).causes
    ('hardware',)
    >>> name(Findings("loss_spike", repeatable=True, fires={"same again": True})) is None
    True
    """
    return next((Naming(causes, why) for when, causes, why in TABLE if when(findings)), None)
