"""Layers for multi-token prediction against the equations of DeepSeek-V3 (``tests.support.models.multi_token``) and transformers' ``MtpModel``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models.proof import Subject
from tests.support.models.small_models import CASES, make_tokens
from trainer.model import multi_token
from trainer.model.multi_token import MultiTokenLayer, MultiTokenObjective
from trainer.model.transformer import Decoder

MODELS = {case.family: case for case in CASES if case.multi_token_layers}
LENGTHS = (23, 4, 3, 31, 2)  # tokens of the documents of a row; the last three are too short for some layer
Z_LOSS = 1e-3


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    return {family: Subject(case, tmp_path_factory.mktemp(family)) for family, case in MODELS.items()}


def make_documents() -> list[tuple[Tensor, Tensor]]:
    """(tokens, which of them carry loss) of each document: texts, and chats whose questions carry none."""
    tokens = make_tokens(1, sum(LENGTHS), seed=5)[0].split(LENGTHS)
    carries = [torch.ones(length, dtype=torch.bool) for length in LENGTHS]
    carries[0][:9] = carries[0][14:17] = False  # two questions
    carries[3][:20] = False
    return list(zip(tokens, carries, strict=True))


def make_batch(documents: list[tuple[Tensor, Tensor]], padding: int = 5) -> dict[str, Tensor]:
    """One row with all documents and padding at its end, as ``trainer.batch.make_batch`` makes it."""
    parts: dict[str, list[Tensor]] = {"tokens": [], "targets": [], "weights": [], "positions": [], "documents": []}
    supervised = sum(int(carries[1:].sum()) for _, carries in documents)
    for number, (tokens, carries) in enumerate(documents):
        length = len(tokens) - 1
        parts["tokens"].append(tokens[:-1])
        parts["targets"].append(tokens[1:])
        parts["weights"].append(carries[1:].float() / supervised)
        parts["positions"].append(torch.arange(length))
        parts["documents"].append(torch.full((length,), number))
    ends = {"tokens": 0, "targets": 0, "weights": 0, "positions": 0, "documents": -1}
    row = {f"{key}_BT": torch.cat([*found, torch.full((padding,), ends[key])])[None] for key, found in parts.items()}
    return row | {"weights_BT": row["weights_BT"].float(), "documents_BT": row["documents_BT"].int()}


def compute_loss(ours: Decoder, weight: float) -> tuple[Tensor, MultiTokenObjective]:
    """The loss of the batch, and what was summed."""
    objective = MultiTokenObjective(weight, torch.zeros(1 + 2 * len(ours.multi_token)))
    loss, _, _ = ours.loss(**make_batch(make_documents()), z_loss=Z_LOSS, objective=objective if weight else None)
    return loss, objective


def compare_logits(subject: Subject) -> float:
    """The largest difference of the logits of all layers, on rows of one document."""
    worst = 0.0
    for document in make_tokens(2, 40, seed=4):
        batch = {key: x_BT[:, : len(document) - 1] for key, x_BT in make_batch([(document, document >= 0)]).items()}
        with torch.no_grad():
            ours = subject.ours.multi_token_logits(batch)
            theirs = subject.multi_token.compute_logits(subject.theirs, document)
        assert len(ours) == len(theirs) == subject.case.multi_token_layers
        for found, expected in zip(ours, theirs, strict=True):
            worst = max(worst, float((found[0, : len(expected)] - expected[: found.shape[1]]).abs().max()))
    return worst


@pytest.mark.parametrize("family", MODELS)
def test_logits_are_those_of_the_equations(subjects: dict[str, Subject], family: str) -> None:
    assert compare_logits(subjects[family]) <= 1e-4


@pytest.mark.parametrize("family", MODELS)
def test_logits_are_those_of_transformers(subjects: dict[str, Subject], family: str) -> None:
    """``generate(use_mtp=True)`` drafts with this class. It reads the folder that the adapter writes."""
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    subject = subjects[family]
    main = type(subject.theirs).from_pretrained(subject.written, dtype=torch.float32, attn_implementation="eager")
    first = subject.source.spec.layers
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{first + k}\..*" for k in range(4)]
    drafting = MtpModel.from_pretrained(main)
    (document,) = make_tokens(1, 40, seed=4)
    with torch.no_grad():
        ours = subject.ours.multi_token_logits(make_batch([(document, document >= 0)], padding=0))
        state = main.model(document[None, :-1], use_cache=False).last_hidden_state
        for k, found in enumerate(ours):
            tokens, length = document[None, k + 1 :], len(document) - 1 - k
            positions = torch.arange(k + 1, len(document))[None]
            cache = MtpCache(config=main.config.get_mtp_config())
            state = drafting.forward_layer(k, state[:, :length], positions, cache, input_ids=tokens)
            expected = drafting._project_to_logits(state)
            assert float((found[:, :length] - expected).abs().max()) <= 1e-4


@pytest.mark.parametrize("family", MODELS)
def test_loss_and_gradients_of_packed_documents_and_masked_chats_are_those_of_each_alone(
    subjects: dict[str, Subject], family: str
) -> None:
    subject, weight = subjects[family], 0.3
    documents = make_documents()
    supervised = sum(int(carries[1:].sum()) for _, carries in documents)
    for module in (subject.ours, subject.theirs, subject.multi_token):
        module.zero_grad()
    plain, _ = compute_loss(subject.ours, 0.0)
    ours, objective = compute_loss(subject.ours, weight)
    added = ours - plain
    added.backward()  # type: ignore[no-untyped-call]

    z_losses, layers = torch.zeros(()), subject.case.multi_token_layers
    for tokens, carries in documents:
        for k, logits in enumerate(subject.multi_token.compute_logits(subject.theirs, tokens), start=1):
            z_losses = z_losses + logits[:-1].logsumexp(-1).square()[carries[k + 1 :]].sum()
    nlls = subject.multi_token.compute_losses(subject.theirs, documents)
    expected = weight / layers * (torch.stack(nlls).sum() + Z_LOSS * z_losses) / supervised
    expected.backward()  # type: ignore[no-untyped-call]
    assert float(added.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    counts = [sum(int(carries[k + 1 :].sum()) for _, carries in documents) for k in range(1, 1 + layers)]
    assert objective.sums.tolist() == pytest.approx(
        [float(x) for x in (expected.detach(), *(nll.detach() for nll in nlls), *counts)], rel=1e-4
    )
    compare_gradients(subject)


def compare_gradients(subject: Subject) -> None:
    """Each gradient within 1e-4 of its largest value. The layers' own loss reaches every tensor but the routers' biases."""
    from tests.support.models.files import list_file_tensors

    of_layers = {n: p.grad for n, p in subject.multi_token.named_parameters() if p.grad is not None}
    of_main = {n: p.grad for n, p in subject.theirs.named_parameters() if p.grad is not None}
    theirs = list_file_tensors(subject.theirs, of_main) | subject.multi_token.list_tensors(of_layers)
    ours = dict(subject.ours.named_parameters())
    compared = set()
    for mapping in subject.source.family.list_mappings(subject.source.spec):
        if mapping.is_copy:
            continue
        for name, expected in mapping.to_native(theirs.get):  # a router's bias has no gradient
            if name not in ours:
                continue
            gradient = ours[name].grad
            assert gradient is not None, name
            difference = float((gradient - expected).abs().max())
            assert difference <= 1e-4 * max(float(expected.abs().max()), 1e-3), name
            compared.add(name)
    assert compared == set(ours)


def test_no_token_of_a_document_changes_the_loss_of_another(subjects: dict[str, Subject]) -> None:
    """Only the tokens of the second document change; the sums of the other documents, measured by masking it, stay to the bit."""
    subject = subjects["deepseek_v3"]
    documents = make_documents()
    changed = [*documents]
    changed[1] = ((documents[1][0] + 1) % subject.source.spec.vocab_size, documents[1][1])
    found = []
    for some in (documents, changed):
        batch = make_batch(some)
        batch["weights_BT"] = torch.where(batch["documents_BT"] == 1, 0.0, batch["weights_BT"])
        objective = MultiTokenObjective(1.0, torch.zeros(5))
        with torch.no_grad():
            subject.ours.loss(**batch, z_loss=0.0, objective=objective)
        found.append(objective.sums)
    assert torch.equal(*found)


# -- mistakes ----------------------------------------------------------------------------------------------------------
def swap_halves(layer: MultiTokenLayer) -> None:
    layer.join.copy_(torch.cat(layer.join.chunk(2, dim=1)[::-1], dim=1))


def swap_norms(layer: MultiTokenLayer) -> None:
    token, state = layer.token_norm.clone(), layer.state_norm.clone()
    layer.token_norm.copy_(state)
    layer.state_norm.copy_(token)


def forget_output_norm(layer: MultiTokenLayer) -> None:
    layer.output_norm.fill_(1.0)


@pytest.mark.parametrize("mistake", [swap_halves, swap_norms, forget_output_norm])
@pytest.mark.parametrize("family", MODELS)
def test_a_mistake_with_a_tensor_is_noticed(
    subjects: dict[str, Subject], family: str, mistake: Callable[[MultiTokenLayer], None]
) -> None:
    ours = subjects[family].ours
    held = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    try:
        with torch.no_grad():
            mistake(ours.multi_token[0])  # type: ignore[arg-type]
        assert compare_logits(subjects[family]) > 1e-2
    finally:
        ours.load_state_dict(held)


def shift_too_far(right: Any) -> Any:
    return lambda targets, weights, documents, depth: right(targets, weights, documents, depth + 1)


def shift_too_little(right: Any) -> Any:
    return lambda targets, weights, documents, depth: right(targets, weights, documents, max(1, depth - 1))


def cross_documents(right: Any) -> Any:
    return lambda targets, weights, documents, depth: right(targets, weights, torch.zeros_like(documents), depth)


def forget_masks(right: Any) -> Any:
    def shift(targets: Tensor, weights: Tensor, documents: Tensor, depth: int) -> Any:
        found = right(targets, weights, documents, depth)
        return found._replace(weights_BT=torch.where(found.weights_BT >= 0, float(weights.max()), 0.0))

    return shift


@pytest.mark.parametrize("mistake", [shift_too_far, shift_too_little, cross_documents, forget_masks])
def test_a_mistake_with_the_shift_is_noticed(
    subjects: dict[str, Subject], monkeypatch: pytest.MonkeyPatch, mistake: Callable[[Any], Any]
) -> None:
    subject = subjects["deepseek_v3"]
    documents = make_documents()
    with torch.no_grad():
        nlls = [float(nll) for nll in subject.multi_token.compute_losses(subject.theirs, documents)]
        assert compute_loss(subject.ours, 1.0)[1].sums[1:3].tolist() == pytest.approx(nlls, rel=1e-4)
        monkeypatch.setattr(multi_token, "shift_batch", mistake(multi_token.shift_batch))
        found = compute_loss(subject.ours, 1.0)[1].sums[1:3].tolist()
    assert max(abs(one / right - 1) for one, right in zip(found, nlls, strict=True)) > 1e-2


@pytest.mark.parametrize("mistake", ["positions", "state before its norm"])
@pytest.mark.parametrize("family", MODELS)
def test_a_mistake_with_what_a_layer_is_given_is_noticed(
    subjects: dict[str, Subject], monkeypatch: pytest.MonkeyPatch, family: str, mistake: str
) -> None:
    right = MultiTokenLayer.forward

    def forward(
        layer: MultiTokenLayer, token: Tensor, state: Tensor, cos: Tensor, sin: Tensor, documents: Tensor, seen: Any
    ) -> Any:
        if mistake == "positions":
            cos, sin = cos[:, :1].expand_as(cos), sin[:, :1].expand_as(sin)
        else:
            state = state / subjects[family].ours.final_norm
        return right(layer, token, state, cos, sin, documents, seen)

    monkeypatch.setattr(MultiTokenLayer, "forward", forward)
    assert compare_logits(subjects[family]) > 1e-3
