"""The share of the trainer and the kernels that the gate's runs execute. No patch may change code that they do not execute."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import CodeType

import pytest

from factory.gates.patch.changed_ops import ChangedOp
from factory.gates.patch.execution_recorder import ExecutedCode, iterate_code_objects
from factory.gates.patch.matrix.unexecuted_code import find_exempt_spans, find_unexecuted_parts
from factory.gates.patch.op_answers import check_tests_unchanged, run_op_jobs
from factory.gates.patch.policy import OraclePolicy
from factory.gates.patch.stages.oracle import make_oracle_jobs
from factory.gates.patch.watch_conditions import compile_watched
from kernels.contract.registry import OPS, find_op
from tests.support.factory.matrix import judge, prepare
from tests.support.paths import ROOT

MOST_ONE_SIDED = 0.2  # of the conditions; a guess that no run has measured yet
LEAST = 0.98  # of the statements that a machine without a GPU can execute
# what only a GPU executes
ELSEWHERE = ("triton.py", "rows_in_triton.py", "varlen.py", "flex.py", "locked_memory.py", "cuda_graphs.py")
# Words of single lines that only a GPU, slow cores, the line profiler's count of FLOPs, or a type checker executes.
NOT_HERE = {
    "trainer/checkpoint_writer.py": (
        "torch.cuda",
        "_disk.submit(",
        "iterate_checkpoint_tensors(contents)",
        "ready",
        "stream",
        "non_blocking",
        "copied",
        "memory",
        "start +=",
    ),
    "trainer/batch.py": ("replace(self", "make_tensor_in_block(", "moved", "blocks", "held", "tensors.items()"),
    # CUDA graphs of micro-batches (``trainer.cuda_graphs``), and the single step that the line profiler asks for
    "trainer/run.py": (
        "use_graphs(CudaGraphCapture())",
        "self.signals.measure_inputs(",
        "def kept(part",
        "found: LayerInputs = {}",
        "self.signals.kept = found",
        "            self._micro_batch(part)",
        "            return found",
        "GraphReplayer(kept",
        "self.launch_step(batch)",
        "self.read_finished_steps()",
        "        return record",
    ),
    "trainer/optim/optimizer.py": (
        "gradients_stay = True",
        "for parameter in self.parameters.values()",
        "zeros_like(parameter)",
        "list(self.gradients().values())",
    ),
    "trainer/monitor/signals.py": ("self.kept[name]", "self._layer in kept", "kept[self._layer]"),
    "trainer/monitor/metrics.py": ("torch.cuda",),
    "trainer/monitor/speed.py": ("torch.cuda", "matmul_"),
    "trainer/parallel/ranks.py": ("torch.cuda", "nccl", "import DeviceMesh"),
    "kernels/attention/__init__.py": (
        "FlashAttention",
        "MOST_HEAD_DIM",
        "flash_heads",
        "why = Message(",
        "recompute, uncompiled",
        "supports_head_dim(",
        "head_dim=shape",
        "dtype=str(",
        "reference: {why}",
    ),
    "kernels/attention/cpp.py": ("dq, dk, dv", "given = ", "B, H, T, K", "B, T, H, K", "B * H * T * T * K"),
    "kernels/linear_cross_entropy/__init__.py": (
        "all_rows",
        "masked_fill",
        "silent",
        "in_fp32",
        "make_fake_outputs(",
        "get_autocast_dtype",
        "chunks.find_gpu_chunk_tokens",
        "chunks.compute_in_chunks",
        "chunks.scale_saved_gradients",
        "term, nll, dlogits = compute_loss_rows_eagerly(",
    ),
    "kernels/linear_cross_entropy/chunks.py": (
        "return min(",
        "add_product(",
        "product_VD",
        "wide = torch",
        "its_dtype = wide",
        "empty = lambda",
        "dx = empty(",
        "return empty((), wide)",
        "(1 + of_x + of_weight)",
        "most",
        "fits",
        "-(-N",
        "choose_gpu_chunk_tokens(",
        "return max(1, N)",
        "if a_VC.is_cuda",
        "torch.cuda",
        "MEMORY_SHARE * GPU_BYTES",
        "out_dtype=wide",
        "wide = torch.promote_types(a_VC",
        "if sum_VD is None",
        "torch.mul(",
    ),
}
COMPILED = ("adamw", "linear_cross_entropy")  # others have no code of their own for the compiler
NATIVE = "cpu: {swiglu: native, attention: native, linear_cross_entropy: native, adamw: fused}\n"


def files() -> Iterator[str]:
    """Patchable files that this machine can execute."""
    for top in ("trainer", "kernels"):
        for path in sorted((ROOT / top).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if "contract" not in path.parts and path.name not in ELSEWHERE:
                yield name


def everything() -> dict[str, list[int]]:
    return {path: [*range(1, 1 + len((ROOT / path).read_text().splitlines()))] for path in files()}


def lines_of(code: CodeType) -> set[int]:
    return {line for part in iterate_code_objects(code) for _, _, line in part.co_lines() if line}


def first_lines(tree: ast.AST) -> dict[int, int]:
    """Line → first line of the innermost statement that it belongs to. So a statement counts once, however many lines it is written in."""
    first: dict[int, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            for line in range(node.lineno, max(node.lineno, last) + 1):
                first[line] = max(first.get(line, 0), node.lineno)
    return first


def executed_by_ops(work: Path) -> ExecutedCode:
    """What the checks of the implementations that run here execute, as when a patch chooses one of them."""
    ops = [
        ChangedOp(name, "reference", implementation)
        for name in OPS
        for implementation, found in find_op(name).implementations.items()
        if found.can_run_on("cpu") and ("compiled" not in implementation or name in COMPILED)
    ]
    policy = OraclePolicy(cases=["small"])
    jobs = make_oracle_jobs(policy, ops, "bf16")  # fp32 and fp64 are among them
    with run_op_jobs(jobs, policy, ROOT, ROOT, work, everything()) as answers:
        assert not answers.missing and not answers.died, answers.missing or answers.died
        assert check_tests_unchanged(answers, policy.patience, ROOT, work) == {}
        return answers.executed


@pytest.mark.long("all tiny runs of the gate twice, and checks of the implementations")
def test_the_gates_runs_execute_the_trainer_and_the_kernels(tmp_path: Path) -> None:
    with ExitStack() as after:
        prepared = prepare(tmp_path, after, chosen=NATIVE)
        found = judge(prepared, ROOT, None, watched=everything())
        assert not found.differences and found.same_bits, found.differences
        executed = found.runs.executed
    executed.merge_executed_code(executed_by_ops(tmp_path / "ops"))
    total, missing = 0, []
    for path in files():
        source = (ROOT / path).read_text()
        text = source.splitlines()
        lines = lines_of(compile(source, path, "exec", dont_inherit=True))
        words_only = {
            n for (first, _), (last, _) in find_exempt_spans(ast.parse(source)) for n in range(first, last + 1)
        }
        lines -= words_only  # a raise that only puts words together: the gate does not ask for it either
        here = {n for n in lines if not any(word in text[n - 1] for word in NOT_HERE.get(path, ()))}
        launched = {n for first, last in executed.launched.get(path, ()) for n in range(first, last + 1)}
        first = first_lines(ast.parse(source))
        ran = {first.get(n, n) for n in executed.lines.get(path, set()) | launched}
        here = {first.get(n, n) for n in here}
        total += len(here)
        left = here - ran
        missing += [f"{path}:{n}: {text[n - 1].strip()}" for n in sorted(left)]
    share = 1 - len(missing) / total
    print(f"the gate's runs execute {share:.2%} of {total} statements; not:", *missing, sep="\n  ")
    conditions, one_sided = 0, []
    for path in files():
        source = (ROOT / path).read_text()
        conditions += len(compile_watched(source, path, everything()[path], path)[1])
        one_sided += [str(part) for part in find_unexecuted_parts(path, "", source, executed) if part.result]
    print(f"{len(one_sided)} of {conditions} conditions had one result:", *one_sided, sep="\n  ")
    assert len(one_sided) < MOST_ONE_SIDED * conditions, "honest patches would be held in masses"
    assert share >= LEAST


def test_ops_of_a_trunk_in_fp8_are_checked_in_bf16() -> None:
    """Its kernels compute in bf16; only the layers' products, which are no op, have operands of eight bits."""
    policy, ops = OraclePolicy(), [ChangedOp("swiglu", "reference", "native")]
    dtypes = lambda precision: [job["dtype"] for job in make_oracle_jobs(policy, ops, precision)]
    assert dtypes("fp8") == dtypes("bf16") and set(dtypes("fp8")) == {"fp32", "bf16", "fp64"}
