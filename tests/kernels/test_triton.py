"""The Triton kernels, forward and backward, in triton's interpreter; it needs its switch set before triton is
imported: a process of its own, which all tests share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from kernels.contract.registry import OPS
from tests.support.paths import ROOT

Run = Callable[..., None]
SERVE = """
import contextlib, io, json, sys, traceback
from tests.support import interpreter_rounding
interpreter_rounding.use()
for line in sys.stdin:
    script, *arguments = json.loads(line)
    said, error = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(said):
            exec(script, {"arguments": arguments})
    except BaseException:
        error = said.getvalue() + traceback.format_exc()
    print(json.dumps(error), flush=True)
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a script in the interpreter's process. An error of the script fails the test."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SERVE]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        asked, answered = process.stdin, process.stdout

        def ask(script: str, *arguments: str) -> None:
            asked.write(json.dumps([script, *arguments]) + "\n")
            asked.flush()
            answer = answered.readline()
            assert answer, f"the interpreter's process ended with {process.wait()}"
            assert not (error := json.loads(answer)), error

        yield ask
        asked.close()


ORACLE = """
import itertools
import torch
from dataclasses import replace
from kernels.contract.oracle import HOSTILE, compare_with_fp64
from kernels.contract.registry import OPS
op = OPS[arguments[0]]
wrong = []
for case in op.cases:
    if case.name == "recipe":
        continue  # the interpreter runs some hundred programs a second
    judged = list(itertools.product(HOSTILE, (torch.float32, torch.bfloat16)))  # each in the smallest shape
    for values, dtype in judged if case.name == "small" else (("normal", torch.float32), ("outlier", torch.bfloat16)):
        if case.name == "small" and values != "normal" and op.name == "embedding":  # a program a token
            case = replace(case, shape=replace(case.shape, context=8))
        result = compare_with_fp64(op, "triton", case, dtype=dtype, values=values)
        if not result.ok:
            wrong.append(f"{case.name} {dtype} {values}: {result.describe_failures()}")
assert not wrong, "\\n".join(wrong)
"""


@pytest.mark.parametrize("op", [name for name, op in OPS.items() if "triton" in op.implementations])
@pytest.mark.slow("Triton's interpreter, kernel by kernel")
def test_a_triton_kernel_agrees_with_fp64_in_the_interpreter(run: Run, op: str) -> None:
    run(ORACLE, op)


ROWS = """
import torch
from kernels import rows_in_triton
from kernels.contract.registry import OPS
from kernels.rows_in_triton import divide_rows_among_programs, choose_tile_settings
generator = torch.Generator().manual_seed(0)
draw = lambda *size: torch.randn(size, generator=generator)
wide = lambda *size: draw(*size[:-1], 2 * size[-1] + 3)[..., 1 : size[-1] + 1]  # a part of a joined product
mirrored = lambda *size: draw(*reversed(size)).permute(*range(len(size) - 1, -1, -1))


def check(name, inputs):
    op, wanted = OPS[name], OPS[name].gradients
    results = []
    for function, cast in ((op.implementations["triton"].function, lambda x: x), (op.reference, torch.Tensor.double)):
        args = [cast(x).requires_grad_(i in wanted) if i + 1 < len(inputs) else x for i, x in enumerate(inputs)]
        out = function(*args)
        out = out if isinstance(out, tuple) else (out,)
        upstream = [torch.linspace(-1, 1, max(1, o.numel()), dtype=o.dtype)[: o.numel()].view(o.shape) for o in out]
        results.append((*out, *torch.autograd.grad(out, [args[i] for i in wanted], upstream)))
    for i, (mine, exact) in enumerate(zip(*results, strict=True)):
        assert mine.shape == exact.shape
        atol = 2e-5 * (1 + float(exact.detach().abs().amax()) if exact.numel() else 0)
        where = lambda m: f"{name} {[tuple(x.shape) for x in inputs[:-1]]} {i}: {m}"
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=atol, msg=where)


# One row more or less than tiles and programs hold, none, and one; widths that fill a block, and that do not.
for rows, D in ((1, 1), (3, 1000), (5, 1024), (33, 100), (67, 3), (0, 64), (2, 4100)):
    for make in (draw, wide, mirrored):
        check("rms_norm", (make(rows, D), draw(D), 1e-6))
        check("add_rms_norm", (make(rows, D), make(rows, D), draw(D), 1e-6))
for B, T, heads, K in ((1, 1, 1, 2), (2, 5, 3, 22), (1, 7, 6, 80), (3, 4, 1, 64), (0, 4, 2, 16), (2, 0, 2, 16)):
    for make in (draw, wide, mirrored):
        tables = [draw(B, T, K // 2).repeat(1, 1, 2) for _ in range(2)]
        check("qk_norm_rope", (make(B, T, heads, K), draw(K), *tables, 1e-6))

# A program has whole tiles, all rows are some program's, and there are as many programs as a card is told to hold.
card = torch.device("cpu")
for rows in (0, 1, 15, 16, 17, 4096, 16384, 100_003):
    for columns in (1, 64, 1000, 1024, 4096, 8192, 65536):
        found, settings = divide_rows_among_programs(rows, columns, 4 * columns, card), choose_tile_settings(columns)
        assert found.rows_each % found.settings["ROWS"] == 0 and settings["BLOCK"] >= columns
        assert (found.programs - 1) * found.rows_each < rows <= found.programs * found.rows_each or rows == 0 == found.programs
        assert found.programs <= rows_in_triton.MULTIPROCESSORS * (16 // found.settings["num_warps"])
        assert (found.settings["STAGES"] - 1) * found.settings["ROWS"] * 4 * columns <= rows_in_triton.SHARED
"""


def test_kernels_take_rows_that_do_not_fill_a_tile_and_any_layout(run: Run) -> None:
    run(ROWS)


REGISTRATION = """
import torch
from kernels.contract.registry import OPS
from kernels.contract.op import CASES
from kernels.add_rms_norm import triton as add_rms_norm_triton
from kernels.embedding import triton as embedding_triton
from kernels.linear_cross_entropy import triton as linear_cross_entropy_triton
from kernels.newton_schulz import triton as newton_schulz_triton
from kernels.qk_norm_rope import triton as qk_norm_rope_triton
from kernels.rms_norm import triton as rms_norm_triton
from kernels.swiglu import triton as swiglu_triton
ops = {
    "rms_norm": rms_norm_triton.forward_op,
    "add_rms_norm": add_rms_norm_triton.forward_op,
    "qk_norm_rope": qk_norm_rope_triton.forward_op,
    "swiglu": swiglu_triton.forward_op,
    "embedding": embedding_triton.forward_op,
    "newton_schulz": newton_schulz_triton.newton_schulz,
    "linear_cross_entropy": linear_cross_entropy_triton.triton_op,
}
tests = ("test_schema", "test_faketensor", "test_autograd_registration")
for case in (c for c in CASES if c.name in ("prime", "empty")):
    for name, op in ops.items():
        extra = (True, True) if name == "linear_cross_entropy" else ()
        torch.library.opcheck(op, (*OPS[name].inputs(case), *extra), test_utils=tests)
"""


def test_the_triton_ops_are_registered_soundly(run: Run) -> None:
    run(REGISTRATION)


LOSS_HEAD = """
import torch
from kernels import linear_cross_entropy as head
from kernels.linear_cross_entropy import chunks, triton as fused
generator = torch.Generator().manual_seed(0)
V = 2 * fused.BLOCK + 77  # a row takes three pieces
x, weight = (torch.randn(n, 8, generator=generator).requires_grad_() for n in (7, V))
targets = torch.tensor([0, V - 1, fused.BLOCK, 5, 6, 7, 8])
weights = torch.tensor([0.3, 0.2, 0.1, 0.0, 0.2, 0.1, 0.1])
for chunks.GPU_TOKENS in (8192, 2, 1):
    found, expected = (f(x, weight, targets, weights, 1e-2) for f in (fused.linear_cross_entropy, head.reference))
    for a, b in zip((*found, *torch.autograd.grad(found[0], (x, weight))),
                    (*expected, *torch.autograd.grad(expected[0], (x, weight)))):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
whole = torch.autograd.grad(fused.linear_cross_entropy(x, weight, targets, weights, 1e-2)[0], (x, weight))
for position, leaf in enumerate((x, weight)):  # the other one is frozen
    given = [one if one is leaf else one.detach() for one in (x, weight)]
    (alone,) = torch.autograd.grad(fused.linear_cross_entropy(*given, targets, weights, 1e-2)[0], leaf)
    assert torch.equal(alone, whole[position])
with torch.no_grad():
    assert torch.equal(fused.linear_cross_entropy(x, weight, targets, weights, 1e-2)[0], found[0])
    masked = fused.linear_cross_entropy(x.index_fill(0, torch.tensor([3]), float("nan")), weight, targets, weights, 0.0)
    assert masked[0].isfinite() and masked[1][3] == 0, "a token without loss takes no part"
    for wrong in (-1, V):
        loss, nll = fused.linear_cross_entropy(x, weight, targets.index_fill(0, torch.tensor([1]), wrong), weights, 0.0)
        assert loss.isnan() and nll.isnan().tolist() == [False, True] + [False] * 5
loss, nll = fused.linear_cross_entropy(x.index_fill(0, torch.tensor([1]), float("inf")), weight, targets, weights, 0.0)
(dx,) = torch.autograd.grad(loss, x)
assert loss.isnan() and nll[1].isnan() and int(nll.isnan().sum()) == 1

class Waits(torch.utils._python_dispatch.TorchDispatchMode):  # raises where a GPU would be waited for
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "masked_select", "unique"), func
        assert func is not torch.ops.aten.index.Tensor or all(i.dtype != torch.bool for i in args[1] if i is not None)
        return func(*args, **kwargs or {})

with torch.no_grad(), Waits():
    fused.triton_op._init_fn(x, weight, targets, weights, 1e-2, True, True)
    try:
        weights.sum().item()
    except AssertionError:
        pass
    else:
        raise SystemExit("a wait was not noticed")

# rows that are hostile by themselves, beside torch's own: [C, V] logits that begin STRIDE apart
inf = float("inf")
buffer = torch.full((8, fused.BLOCK + 32), 7e37)  # what lies between rows is in no sum
logits = buffer[:, : fused.BLOCK + 21]
logits.copy_(torch.randn(logits.shape, generator=generator))
logits[0, 5] = logits[0, 5 + fused.BLOCK] = inf  # of one thread's column
logits[1] = -inf
logits[2, 9:] = -inf
logits[3] = 3e38
logits[4, 17] = float("nan")
logits[5] = -3.3e38
logits[6] *= 1e4
targets, weights = torch.full((8,), 3), torch.full((8,), 0.5)
wide = logits.double()
exact = torch.logsumexp(wide, 1)
terms, nll, gradient = fused.compute_loss_rows(logits, targets, weights, 0.0, True)
torch.testing.assert_close(nll.double(), exact - wide[:, 3], rtol=1e-6, atol=1e-5, equal_nan=True)
dlogits = 0.5 * (wide.softmax(1) - torch.nn.functional.one_hot(targets, logits.shape[1]))
for row in (2, 3, 5, 6, 7):
    torch.testing.assert_close(gradient[row].double(), dlogits[row], rtol=1e-5, atol=1e-6)
assert gradient.data_ptr() == buffer.data_ptr() and not gradient[4].isfinite().any()
"""


def test_the_loss_head_takes_pieces_of_a_row_chunks_and_poisoned_tokens(run: Run) -> None:
    run(LOSS_HEAD)


OPTIMISER = """
import torch
from kernels import adamw, newton_schulz
from kernels.adamw.triton import BLOCK, adamw as update
from kernels.newton_schulz.triton import LARGE, SMALL, newton_schulz as orthogonalise, multiply_by_own_transpose
generator = torch.Generator().manual_seed(0)

for tile, columns in ((SMALL, 70), (LARGE, 128)):  # tiles beside the diagonal; a rest of rows, and of columns in small ones
    a = torch.randn(2, 2 * tile["BLOCK"] + 9, columns, generator=generator)
    gram = multiply_by_own_transpose(a)
    torch.testing.assert_close(gram, a @ a.mT, rtol=1e-4, atol=1e-4)
    mine = torch.arange(gram.shape[-1]) // tile["BLOCK"]
    beside = mine[:, None] != mine  # within a tile of the diagonal, products of the interpreter round as its BLAS does
    assert torch.equal(gram[:, beside], gram.mT[:, beside]), "each tile is stored twice"
    torch.testing.assert_close(multiply_by_own_transpose(gram, 0.5, -2.0), 0.5 * gram @ gram - 2 * gram, rtol=1e-4, atol=1e-2)
for shape in ((150, 200), (200, 150), (3, 150, 70)):
    matrices = torch.randn(shape, generator=generator)
    mine, theirs = orthogonalise(matrices, 5).double(), newton_schulz.reference(matrices, 5).double()
    exact = newton_schulz.reference(matrices.double(), 5)
    assert mine.shape == exact.shape and (mine - exact).norm() <= 1.5 * (theirs - exact).norm(), shape

def state(sizes):
    generator = torch.Generator().manual_seed(1)
    lists = [[torch.randn(s, generator=generator) for s in sizes] for _ in range(3)]
    return *lists, [x.square() for x in lists[2]], [torch.tensor(float(i)) for i in range(4)]

settings = (1e-2, 0.9, 0.999, 1e-8, 0.1)
even = ((16, 8), (2, BLOCK), (0, 4), (1, 16))  # loads of 16 bytes
for sizes in (even, ((3, BLOCK), (7,), (0, 4), (BLOCK + 1,))):  # several programs a tensor, and none
    mine, theirs = state(sizes), state(sizes)
    for _ in range(3):  # gradients lie somewhere else in each step
        drawn = [torch.randn(s, generator=generator) for s in sizes]
        for f, held in ((update, mine), (adamw.reference, theirs)):
            held[1][:] = [x.clone() for x in drawn]
            f(*held, torch.tensor(1.7), torch.tensor(0.0), *settings)
        for a, b in zip(mine, theirs):
            for x, y in zip(a, b):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
before = [[x.clone() for x in held] for held in mine]
sick = [torch.full_like(x, float("nan")) for x in mine[1]]
update(mine[0], sick, *mine[2:], torch.tensor(1.7), torch.tensor(1.0), *settings)
assert all(torch.equal(x, y) for a, b in zip(mine, before) for x, y in zip(a, b)), "skipped"
"""


def test_the_optimisers_ops_take_partial_tiles_and_blocks_and_skip_an_update(run: Run) -> None:
    run(OPTIMISER)


EMBEDDING = """
import torch
from kernels.embedding import reference
from kernels.embedding.triton import embedding
generator = torch.Generator().manual_seed(0)
weight = torch.randn(11, 200, generator=generator).bfloat16().requires_grad_()  # two blocks of columns
tokens = torch.randint(0, 11, (300,), generator=generator).clamp(max=4)  # token 4 has most places, 5 to 10 none
upstream = torch.randn(300, 200, generator=generator).bfloat16()
first, again = (torch.autograd.grad(embedding(tokens, weight), weight, upstream)[0] for _ in range(2))
assert torch.equal(first, again) and not first[5:].any()
exact = torch.zeros(11, 200, dtype=torch.float64).index_add_(0, tokens, upstream.double())
eager = torch.autograd.grad(reference(tokens, weight), weight, upstream)[0]
rounding = (exact.bfloat16().double() - exact).norm()
assert (first.double() - exact).norm() <= 1.01 * rounding, "summed in fp32, rounded once"
print((eager.double() - exact).norm() / rounding)
try:
    embedding(torch.tensor([11]), weight)
except IndexError:
    pass
else:
    raise AssertionError("a token that is none")
"""


def test_the_embeddings_gradient_is_summed_in_fp32_in_one_order(run: Run) -> None:
    run(EMBEDDING)
