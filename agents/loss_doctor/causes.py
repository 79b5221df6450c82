"""The table from the outcomes of the arms to a cause: a pure function. An answer may be two causes, or ``unknown``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agents.loss_doctor.arms import AS_BEFORE, COMMIT, EARLIER, ENVIRONMENT, FP32, KERNELS, MICRO, MIXTURE, ORDER
from kernels.contract.message import Message

BAD_DATA, DATA_AND_STATE, REPEATED = "bad data", "data × state", "contamination or repeated data"
ORDER_OR_PACKING, RATE, PRECISION, KERNEL = "data order or packing", "rate", "numeric precision", "faulty kernel"
CODE, STATE_LOST, HARDWARE, LAYOUT = "code change", "state lost on resume", "hardware", "layout"
SHARES, LOSS_MASK = "mixture shift or wrong label", "loss mask"
PLATEAU, NEW_GENERATION, UNKNOWN = "true plateau", "new generation", "unknown"
HEALTHY = ((PLATEAU,), (NEW_GENERATION,))  # answers after which nothing has to be done
NON_FINITE = "non_finite"  # a kind of anomaly that good documents never cause
SPREAD = 0.4  # if more than this share of a window's documents must be masked, no single documents are to blame


@dataclass(frozen=True)
class ArmFindings:
    """The findings so far. An arm that ``fires`` lacks was not run. Its value is None if the arm neither cleared the anomaly nor showed it."""

    kind: str
    low: bool = False  # the anomaly is a loss that is too low
    fires: Mapping[str, bool | None] = field(default_factory=dict)  # by arm
    repeatable: bool | None = None  # two runs of the same replay left the same bits
    kernels_are_reference: bool = False  # then the arm of reference kernels is not run
    masked_clears: bool | None = None  # masking all suspects clears the anomaly; None: not tried
    guilty_share: float = 0.0  # share of the window's documents that must be masked together
    older_fires: bool | None = (
        None  # the guilty documents have the same effect at another checkpoint; None: unclear, or no such checkpoint
    )
    joined_clears: str = (
        ""  # LOSS_MASK or SHARES: the oddity of new documents, if masking all of these clears the anomaly
    )
    rate_clears: str = ""  # the first arm of the rate that cleared the anomaly
    one_rank: bool = False  # the replay has another number of ranks than the training
    resumed: bool = False  # the newest checkpoint lacks the optimiser's moments
    generation_begins: bool = False  # new shards joined where the anomaly began
    shards_kind: bool = False  # the guilty documents are like many of the new shards
    too_many: bool = False  # the guilty documents are each like some earlier ones
    learnt: bool = False  # documents of the new shards no longer stand out at the segment's end
    environment: bool = False  # the environment changed with the segment
    strange: bool = False  # some document of the window stands out from the earlier documents
    finished: bool = False  # no arm is left to run
    failed: bool = False  # some arm could not be run; without its outcome nothing is called healthy

    def is_anomaly_cleared_by(self, arm: str) -> bool:
        return self.fires.get(arm) is False


@dataclass(frozen=True)
class DiagnosedCause:
    """A cause, or two causes that the arms cannot tell apart, and the reason."""

    causes: tuple[str, ...]
    why: str


CauseRule = tuple[Callable[[ArmFindings], bool], tuple[str, ...], Message]

# The first row whose condition holds gives the answer. A row may rely on the rows above it.
TABLE: tuple[CauseRule, ...] = (
    (
        lambda f: f.repeatable is False,
        (HARDWARE,),
        Message(
            "loss_doctor.two_results",
            "two runs of the same replay gave different bits: a device makes errors, or the code is not deterministic",
        ),
    ),
    (
        lambda f: f.is_anomaly_cleared_by("same again") and f.one_rank,
        (HARDWARE, LAYOUT),
        Message(
            "loss_doctor.not_on_one_rank",
            "a replay of the same steps from the same checkpoint, on one rank, does not show the anomaly: a "
            "device is faulty, or the work is divided wrongly among the ranks",
        ),
    ),
    (
        lambda f: f.is_anomaly_cleared_by("same again"),
        (HARDWARE,),
        Message(
            "loss_doctor.not_again",
            "a replay of the same steps from the same checkpoint does not show the anomaly: data, code and recipe "
            "are not the cause",
        ),
    ),
    (
        lambda f: f.is_anomaly_cleared_by(FP32.name) and f.is_anomaly_cleared_by(KERNELS.name),
        (PRECISION, KERNEL),
        Message("loss_doctor.fp32_and_kernels", "the anomaly disappears in fp32, and also with the reference kernels"),
    ),
    (
        lambda f: f.is_anomaly_cleared_by(FP32.name) and (f.kernels_are_reference or KERNELS.name in f.fires),
        (PRECISION,),
        Message("loss_doctor.fp32", "the anomaly disappears in fp32, but not with the reference kernels"),
    ),
    (
        lambda f: f.is_anomaly_cleared_by(KERNELS.name),
        (KERNEL,),
        Message("loss_doctor.kernels", "the anomaly disappears with the reference kernels"),
    ),
    (
        lambda f: f.is_anomaly_cleared_by(MICRO),
        (LAYOUT,),
        Message(
            "loss_doctor.micro_batches",
            "the anomaly disappears if all rows form one micro-batch: the loss depends on the accumulation of "
            "micro-batches",
        ),
    ),
    (
        lambda f: f.is_anomaly_cleared_by(EARLIER.name) and f.resumed,
        (STATE_LOST,),
        Message(
            "loss_doctor.moments",
            "the anomaly disappears in a run from an earlier checkpoint, and the newest checkpoint lacks the optimiser's moments",
        ),
    ),
    (
        lambda f: f.is_anomaly_cleared_by(MIXTURE.name),
        (SHARES,),
        Message("loss_doctor.shares", "the anomaly disappears with the mixture of domains of the previous segment"),
    ),
    (
        lambda f: f.rate_clears == AS_BEFORE,
        (RATE,),
        Message(
            "loss_doctor.rate_as_before",
            "the anomaly disappears with the optimiser and schedule of the previous segment",
        ),
    ),
    (
        lambda f: f.is_anomaly_cleared_by(COMMIT.name),
        (CODE,),
        Message("loss_doctor.commit", "the anomaly disappears with the code of the previous segment"),
    ),
    (
        lambda f: f.is_anomaly_cleared_by(ENVIRONMENT.name),
        (CODE,),
        Message("loss_doctor.environment_before", "the anomaly disappears in the environment of the previous segment"),
    ),
    (
        lambda f: f.joined_clears == LOSS_MASK,
        (LOSS_MASK,),
        Message(
            "loss_doctor.loss_mask",
            "the anomaly disappears if the new documents are masked. Their loss mask selects other tokens than the loss mask "
            "of earlier documents",
        ),
    ),
    (
        lambda f: f.joined_clears == SHARES,
        (SHARES,),
        Message(
            "loss_doctor.wrong_label",
            "the anomaly disappears if the new documents are masked. They look like documents of another domain",
        ),
    ),
    (
        lambda f: bool(f.masked_clears) and f.guilty_share > SPREAD and f.is_anomaly_cleared_by(ORDER.name),
        (ORDER_OR_PACKING,),
        Message(
            "loss_doctor.order",
            "the anomaly disappears if many of the step's documents are masked. It also disappears with other documents of the same "
            "shards. So no single document is to blame",
        ),
    ),
    (
        lambda f: (
            f.learnt
            and not f.low
            and f.kind != NON_FINITE
            and (f.shards_kind or (f.guilty_share > SPREAD and ORDER.name in f.fires))
        ),
        (NEW_GENERATION,),
        Message(
            "loss_doctor.learnt",
            "the anomaly disappears if a kind of document that is common in the new shards is masked. By the segment's "
            "end, the model had learnt these documents",
        ),
    ),
    (
        lambda f: f.too_many,
        (BAD_DATA, REPEATED),
        Message(
            "loss_doctor.too_many",
            "the anomaly disappears if some documents are masked. Earlier shards have similar documents, but here too many "
            "of them came at once",
        ),
    ),
    (
        lambda f: f.shards_kind and (not f.low or f.older_fires is True),
        (NEW_GENERATION, BAD_DATA),
        Message(
            "loss_doctor.shards_kind",
            "the anomaly disappears if a kind of document that is common in the new shards is masked: this kind is to "
            "blame, not single documents",
        ),
    ),
    (
        lambda f: bool(f.masked_clears) and f.guilty_share > SPREAD and ORDER.name in f.fires,
        (NEW_GENERATION, BAD_DATA),
        Message(
            "loss_doctor.same_shards",
            "the anomaly disappears if many of the step's documents are masked. Other documents of the same shards cause "
            "the anomaly too. So no single document is to blame",
        ),
    ),
    (
        lambda f: bool(f.masked_clears) and f.guilty_share <= SPREAD and f.low and f.older_fires is False,
        (REPEATED,),
        Message(
            "loss_doctor.repeated",
            "the loss is no longer too low if some documents are masked. At an older checkpoint, these documents had a "
            "usual loss, so the model has learnt them since then",
        ),
    ),
    (
        lambda f: bool(f.masked_clears) and f.guilty_share <= SPREAD and f.older_fires is True,
        (BAD_DATA,),
        Message(
            "loss_doctor.bad_documents",
            "the anomaly disappears if some documents are masked, and these documents have the same effect at another "
            "checkpoint",
        ),
    ),
    (
        lambda f: bool(f.masked_clears) and f.guilty_share <= SPREAD and f.older_fires is False,
        (DATA_AND_STATE,),
        Message(
            "loss_doctor.documents_and_state",
            "the anomaly disappears if some documents are masked, but these documents do no harm at another checkpoint",
        ),
    ),
    (
        lambda f: bool(f.masked_clears) and f.finished and f.low,
        (BAD_DATA, REPEATED),
        Message(
            "loss_doctor.always_too_easy",
            "the anomaly disappears if some documents are masked. It is unknown whether the loss of these "
            "documents was also too low at another checkpoint",
        ),
    ),
    (
        lambda f: bool(f.masked_clears) and f.finished,
        (BAD_DATA, DATA_AND_STATE),
        Message(
            "loss_doctor.one_checkpoint",
            "the anomaly disappears if some documents are masked. It is unknown whether these documents have "
            "the same effect at another checkpoint",
        ),
    ),
    (
        lambda f: f.is_anomaly_cleared_by(ORDER.name) and not f.masked_clears,
        (ORDER_OR_PACKING,),
        Message(
            "loss_doctor.other_documents",
            "the anomaly disappears with other documents of the same shards, but masking documents did not remove it",
        ),
    ),
    (
        lambda f: f.is_anomaly_cleared_by(EARLIER.name),
        (STATE_LOST, HARDWARE),
        Message(
            "loss_doctor.newest_checkpoint",
            "the anomaly disappears in a run from an earlier checkpoint: the newest checkpoint holds a wrong state",
        ),
    ),
    (
        lambda f: bool(f.rate_clears),
        (RATE,),
        Message(
            "loss_doctor.smaller_step",
            "no document is to blame, and a smaller step of the optimiser removes the anomaly",
        ),
    ),
    (
        lambda f: f.finished and f.environment and ENVIRONMENT.name not in f.fires,
        (CODE, UNKNOWN),
        Message(
            "loss_doctor.environment_changed",
            "no replay removed the anomaly. The environment changed with the segment, and the previous environment "
            "is not available",
        ),
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
        Message(
            "loss_doctor.mostly_bad",
            "the anomaly began when new shards joined, and no replay removed it. Some documents stand out: the new "
            "shards may be mostly bad",
        ),
    ),
    (
        lambda f: f.finished and not f.failed and f.generation_begins and not f.low and f.kind != NON_FINITE,
        (NEW_GENERATION,),
        Message(
            "loss_doctor.new_shards",
            "the anomaly began when new shards joined, and no replay removed it. No document "
            "stands out, apart from those that the model had learnt by the segment's end",
        ),
    ),
    (
        lambda f: f.finished and not f.failed and f.kind == "plateau",
        (PLATEAU,),
        Message("loss_doctor.plateau", "no replay makes the loss fall"),
    ),
    (lambda f: f.finished, (UNKNOWN,), Message("loss_doctor.no_arm", "no replay removed the anomaly")),
)


def choose_cause(findings: ArmFindings) -> DiagnosedCause | None:
    """The cause, or None if the findings are not yet enough. ``finished`` findings always give a cause.

    >>> choose_cause(ArmFindings("loss_spike", repeatable=False)).causes
    ('hardware',)
    >>> choose_cause(ArmFindings("loss_spike", repeatable=True, fires={"same again": True})) is None
    True
    """
    return next((DiagnosedCause(causes, why) for when, causes, why in TABLE if when(findings)), None)
