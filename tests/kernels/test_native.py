"""C++ kernels beyond the oracle's cases: any layout of memory, any documents, any threads, NaN, chunks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import attention, linear_cross_entropy, native
from kernels.attention import cpp as attention_native
from kernels.contract.op import KernelError
from kernels.linear_cross_entropy import cpp as linear_cross_entropy_native
from tests.support.messages import refused

Call = Callable[..., Tensor]
ROOT = Path(__file__).parents[2]
B, T, H, G, K = 3, 150, 4, 2, 32  # three blocks of queries, the last one short

pytestmark = pytest.mark.portable
BF16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(
        not attention_native.is_usable(K, torch.bfloat16), reason="this CPU does not multiply bf16"
    ),
)
in_each_dtype = pytest.mark.parametrize("dtype", [torch.float32, BF16])


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def made(dtype: torch.dtype, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """(q, k, v), and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(B, T, heads, K, generator=generator).to(dtype) for heads in (H, G, G, H))
    return [q, k, v], do


def documents(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return {
        "one": torch.zeros(B, T),
        "packed": (torch.rand(B, T, generator=generator) < 0.05).cumsum(1),
        "each token its own": torch.arange(T).expand(B, T),
        "padded": torch.where(torch.arange(T) < 100, 0, -1).expand(B, T),
        "scattered": torch.randint(0, 4, (B, T), generator=generator),
    }[kind].long()


def gradients(call: Call, qkv: list[Tensor], document: Tensor, do: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in qkv]
    o = call(*leaves, document)
    o.backward(do.to(o.dtype))
    return [o.detach(), *(x.grad for x in leaves)]  # type: ignore[list-item]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-12))


@in_each_dtype
@pytest.mark.parametrize("kind", ["one", "packed", "each token its own", "padded", "scattered"])
def test_native_attention_is_no_further_from_fp64_than_the_reference_for_any_documents(
    kind: str, dtype: torch.dtype
) -> None:
    qkv, do = made(dtype)
    exact = gradients(attention.reference, [x.double() for x in qkv], documents(kind), do)
    theirs = gradients(attention.reference, qkv, documents(kind), do)
    ours = gradients(attention.native, qkv, documents(kind), do)
    for mine, other, right in zip(ours, theirs, exact):
        assert error(mine, right) <= 1.1 * error(other, right) + (1e-3 if dtype == torch.bfloat16 else 1e-6)


@in_each_dtype
def test_native_attention_gives_the_same_bits_for_any_layout_in_memory(dtype: torch.dtype) -> None:
    """The layouts are views of one joined product, other orders of dimensions, and rows that begin at an odd element."""
    qkv, do = made(dtype)
    plain = gradients(attention.native, qkv, documents("packed"), do)
    joined = torch.cat(qkv, dim=2).split([H, G, G], dim=2)
    heads_outside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
    odd_rows = [torch.cat((x.flatten(2), x.flatten(2)[..., :1]), dim=-1)[..., :-1].unflatten(2, (-1, K)) for x in qkv]
    reversed_last = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in qkv]
    for views in (joined, heads_outside, odd_rows, reversed_last):
        found = [attention_native.forward_op(*views, documents("packed"))]
        found += attention_native.backward_op(
            *views, documents("packed"), do.transpose(1, 2).contiguous().transpose(1, 2)
        )
        assert all(torch.equal(a, b) for a, b in zip(found, plain))


@in_each_dtype
def test_the_number_of_threads_changes_no_bit_of_native_attention(
    threads: Callable[[int], None], dtype: torch.dtype
) -> None:
    qkv, do = made(dtype)
    found = []
    for count in (1, 2, 5):
        threads(count)
        found.append(gradients(attention.native, qkv, documents("packed"), do))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


@in_each_dtype
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_native_attention_keeps_non_finite_values_and_keeps_them_in_their_document(
    value: float, dtype: torch.dtype
) -> None:
    """The trainer's guard looks for NaN. A kernel that turned NaN into numbers would hide a broken step.

    Inside a block of 64 a masked weight of zero times NaN is NaN, as in the reference; other blocks never meet it.
    """
    qkv, do = made(dtype)
    for x in qkv[:2]:
        x[0, 70] = value
    document = documents("one")
    document[0, 128:] = 1
    found = gradients(attention.native, qkv, document, do)
    assert not found[0][0, 70:128].isfinite().any() and not found[1][0, 70].isfinite().any()
    for x in found:
        assert x[0, 128:].isfinite().all() and x[1:].isfinite().all()


@in_each_dtype
def test_native_attention_gives_the_same_results_inside_a_compiled_block(dtype: torch.dtype) -> None:
    qkv, do = made(dtype)

    def block(q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
        return attention.native(q * 2, k, v, document) + 1

    plain = gradients(block, qkv, documents("packed"), do)
    compiled = gradients(torch.compile(block, dynamic=False, fullgraph=True), qkv, documents("packed"), do)
    assert all(torch.equal(a, b) for a, b in zip(plain, compiled))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_native_attention_leaves_another_dtype_to_the_other_implementation(dtype: torch.dtype) -> None:
    qkv, do = made(dtype)
    ours, theirs = (gradients(f, qkv, documents("packed"), do) for f in (attention.native, attention.recompute))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


def test_native_attention_leaves_bf16_to_the_other_implementation_where_it_cannot_be_multiplied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    qkv, do = made(torch.bfloat16)
    monkeypatch.setattr(attention_native, "is_usable", lambda head_dim, dtype: False)
    ours, theirs = (gradients(f, qkv, documents("packed"), do) for f in (attention.native, attention.recompute))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux measures a process's peak memory")
def test_native_attention_never_holds_a_score_for_each_pair() -> None:
    """The square of one head's scores is 256 MiB here. A thread holds the scores of 64 queries, twice."""
    script = """
import torch
from pathlib import Path
from kernels import attention
torch.set_num_threads(2)
def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))
def train(T):
    q, k, v = (torch.randn(1, T, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    attention.native(q, k, v, torch.zeros(1, T, dtype=torch.long)).sum().backward()
train(64)
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
train(8192)
print(memory("VmHWM") - before)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64 << 20


def head(dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(size, 48, generator=generator).to(dtype).requires_grad_() for size in (301, 131))
    targets = torch.randint(131, (301,), generator=generator)
    weights = (torch.rand(301, generator=generator) < 0.7).float() / 301
    return x, weight, targets, weights


def losses(call: Callable[..., tuple[Tensor, Tensor]], inputs: tuple[Tensor, ...], upstream: float) -> list[Tensor]:
    x, weight = inputs[:2]
    x.grad = weight.grad = None
    loss, nll = call(*inputs, 1e-3)
    (loss * upstream).backward()
    assert x.grad is not None and weight.grad is not None
    return [loss.detach(), nll, x.grad, weight.grad]


def check_against_fp64(inputs: tuple[Tensor, ...], upstream: float) -> list[Tensor]:
    """Check that the native loss head is not further from fp64 than the reference in the same dtype."""
    wide = [x.detach().double().requires_grad_() for x in inputs[:2]]
    exact = losses(linear_cross_entropy.reference, (*wide, *inputs[2:]), upstream)
    theirs = losses(linear_cross_entropy.reference, inputs, upstream)
    found = losses(linear_cross_entropy.native, inputs, upstream)
    for mine, other, right in zip(found, theirs, exact):
        assert error(mine, right) <= 1.1 * error(other, right) + 1e-6
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [131 * 301, 131 * 100, 131 * 7, 1])
def test_chunks_change_the_native_loss_head_by_rounding_only(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_cross_entropy_native, "CHUNK", chunk)
    monkeypatch.setattr(linear_cross_entropy_native, "LEAST_TOKENS", 1)
    found = check_against_fp64(head(dtype), 3.0)
    assert found[3].dtype == dtype


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "found"),
    [(2048, 49_152, 512), (2048, 4096, 2048), (9000, 4096, 4096), (100, 49_152, 100), (2048, 1 << 20, 512)],
)
def test_a_large_vocabulary_does_not_make_the_chunks_of_the_head_small(
    tokens: int, vocabulary: int, found: int
) -> None:
    x, weight = torch.empty(tokens, 1, device="meta"), torch.empty(vocabulary, 1, device="meta")
    assert linear_cross_entropy_native.count_chunk_tokens(x, weight) == found


def test_logits_far_apart_are_neither_slow_nor_wrong() -> None:
    """Such logits give softmax values below the smallest normal number, and a product with one of them took a hundred cycles."""
    inputs = head(torch.bfloat16)
    with torch.no_grad():
        inputs[1].mul_(20)
    check_against_fp64(inputs, 1.0)
    logits = (inputs[0] @ inputs[1].t()).detach()
    linear_cross_entropy_native.compute_loss_rows(logits, inputs[2], inputs[3], 1e-3, True)
    assert logits[logits != 0].abs().min() > torch.finfo(torch.float32).tiny


def test_a_target_outside_the_vocabulary_is_an_error_and_a_batch_without_tokens_has_no_loss() -> None:
    x, weight, targets, weights = head(torch.bfloat16)
    for wrong in (-1, 131):
        with pytest.raises(IndexError, match="vocabulary of 131"):
            linear_cross_entropy.native(x, weight, targets.index_fill(0, torch.tensor([5]), wrong), weights, 0.0)
    with torch.no_grad():
        loss, nll = linear_cross_entropy.native(x[:0], weight, targets[:0], weights[:0], 0.0)
    assert loss == 0 and nll.shape == (0,)
    loss, nll = linear_cross_entropy.native(x[:0], weight, targets[:0], weights[:0], 0.0)
    loss.backward()
    assert loss == 0 and nll.shape == (0,) and not weight.grad.any()  # type: ignore[union-attr]


def test_a_poisoned_token_makes_the_loss_nan_and_no_other_tokens_gradient() -> None:
    x, weight, targets, weights = head(torch.bfloat16)
    kept, masked = int(weights.nonzero()[0]), int((weights == 0).nonzero()[0])
    with torch.no_grad():
        x[masked] = float("nan")
    loss, nll = linear_cross_entropy.native(x, weight, targets, weights, 0.0)
    assert loss.isfinite() and nll[masked] == 0, "a token without loss takes no part"
    with torch.no_grad():
        x[kept] = float("nan")
    loss, nll = linear_cross_entropy.native(x, weight, targets, weights, 0.0)
    loss.backward()
    assert loss.isnan() and nll[kept].isnan() and int(nll.isnan().sum()) == 1
    assert x.grad is not None and x.grad[kept].isnan().all() and int(x.grad.isnan().any(-1).sum()) == 1


def test_inputs_whose_shapes_do_not_match_are_refused_and_not_read_past_their_end() -> None:
    (q, k, v), do = made(torch.float32)
    document = documents("one")
    for wrong in (
        (q, k, v, document[:1]),
        (q, k.bfloat16(), v.bfloat16(), document),
        (q.double(), k.double(), v.double(), document),
        (q, k[:, :50], v[:, :50], document),
        (q[:, :, :3], k, v, document),
        (q, k, v[:, :, :1], document),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            attention_native.forward_op(*wrong)
    with pytest.raises(ValueError, match="do not fit"):
        attention_native.backward_op(q, k, v, document, do[:, 1:])
    x, weight, targets, weights = head(torch.bfloat16)
    for few in ((targets[:3], weights), (targets, weights[:3])):
        with pytest.raises(ValueError, match="do not fit"):
            linear_cross_entropy.native(x, weight, *few, 0.0)


@in_each_dtype
def test_a_lone_last_query_takes_nothing_from_the_block_before(dtype: torch.dtype) -> None:
    (q, k, v), do = (
        ([x[:, :71] for x in given] if isinstance(given, list) else given[:, :71]) for given in made(dtype)
    )
    q = q.clone()
    q[0, 7] = float("nan")
    document = documents("one")[:, :71].clone()
    document[0, 64:] = 1
    found = gradients(attention.native, [q, k, v], document, do)
    assert all(x[0, 64:].isfinite().all() for x in found)


@pytest.mark.parametrize("dtype", [BF16])
def test_an_error_of_the_matrix_units_does_not_end_the_process(dtype: torch.dtype) -> None:
    qkv, do = made(dtype)
    o = attention_native.forward_op(*qkv, documents("one"))
    with torch.backends.mkldnn.flags(enabled=False), pytest.raises(RuntimeError, match="refused"):
        attention_native.backward_op(*qkv, documents("one"), o)


def test_loading_waits_for_a_library_that_another_rank_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, compiled = Path(native.load_library("attention")._name), []

    def compile_to(target: Path, *_: object) -> None:
        compiled.append(target)
        time.sleep(0.2)
        shutil.copy(made, target)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(native, "compile_library", compile_to)
    ranks = [threading.Thread(target=native.load_library.__wrapped__, args=("attention",)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    (target,) = compiled
    assert list(target.parent.iterdir()) == [target], "and no lock is left behind"


def test_a_file_beside_the_ops_own_is_compiled_with_its_headers_and_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = tmp_path / "sources" / "doubling"
    op.mkdir(parents=True)
    (op / "two.h").write_text("#pragma once\nconstexpr long TWO = 2;\n")
    text = '#include "two.h"\n// compile with: -O2 -funroll-loops\nextern "C" long twice(long x) { return TWO * x; }\n'
    (op / "fast.cpp").write_text(text)
    monkeypatch.setattr(native, "SOURCES", tmp_path / "sources")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    compiled: list[list[str]] = []
    compile_library = native.compile_library

    def noted(target: Path, text: str, arguments: list[str]) -> None:
        compiled.append(arguments)
        compile_library(target, text, arguments)

    monkeypatch.setattr(native, "compile_library", noted)
    assert native.load_library("doubling/fast").twice(21) == 42
    assert compiled[0][-2:] == ["-O2", "-funroll-loops"]
    (op / "wrong.cpp").write_text(text.replace("-O2", "-fplugin=x.so"))
    with refused("kernels.compile_option", KernelError, option="-fplugin=x.so"):
        native.load_library("doubling/wrong")
    native.load_library.cache_clear()
