"""Trains segment folders and records which of the watched lines are executed. Runs inside the sandbox, from a worktree.

``python train_cases.py RECORDER REQUEST OUT``

RECORDER: the path of ``factory.gates.patch.execution_recorder``. REQUEST: a JSON file with ``{"folders": [{"folder", "stop_after", "waits",
"slow_threads"}], "tools": [{"folder", "module", "arguments"}], "watched": {path: [lines]}, "ranks", "disturbed"}``. Each rank writes
``OUT/rank-N.json`` with ``{"executed": …, "codes": [exit code of each folder, then of each tool]}``. Each tool's folder gets its ``printed.txt``.

torch.compile traces, but the backend is eager: compilation would take minutes for all sizes of the matrix.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

LATE_SECONDS = 0.5  # as long as many steps take
ROUNDINGS = 0.25  # the error of a perturbed op, in units of the last place

sys.path[0] = os.getcwd()  # the worktree's packages, not this file's neighbours


def train_segment_folder(folder: Path, stop_after: int, waits: bool, slow_threads: bool) -> int:
    """Train a segment and return the exit code.

    After ``stop_after`` steps the trainer gets a request to stop, and then starts once more; 0: no request. ``waits``: the trainer starts twice, with
    --wait. ``slow_threads``: new threads start late.
    """
    from trainer.__main__ import main
    from trainer.contract import stopping

    if slow_threads:
        with delay_threads():
            return main([str(folder)])
    if waits:
        codes = [run_program("trainer", ["--wait", str(folder)]) for _ in range(2)]
        return max(codes)
    if not stop_after:
        return main([str(folder)])
    asked, left = stopping.is_stop_requested, [stop_after + 1]  # asked once before the segment, then at every step

    def soon() -> bool:
        left[0] -= 1
        return left[0] <= 0

    stopping.is_stop_requested = soon
    try:
        first = main([str(folder)])
    finally:
        stopping.is_stop_requested = asked
    return main([str(folder)]) if first == 75 else 1000 + first


@contextlib.contextmanager
def delay_threads() -> Iterator[None]:
    """Threads that start in this context begin ``LATE_SECONDS`` late."""
    run = threading.Thread.run

    def late(thread: threading.Thread) -> None:
        time.sleep(LATE_SECONDS)
        run(thread)

    threading.Thread.run = late  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        threading.Thread.run = run  # type: ignore[method-assign]


def run_tool(folder: Path, module: str, arguments: list[str]) -> int:
    """Run a tool and return its exit code. Its output goes to ``folder``."""
    with open(folder / "printed.txt", "w") as out, contextlib.redirect_stdout(out):
        return run_program(module, arguments)


def run_program(module: str, arguments: list[str]) -> int:
    """Run ``python -m module`` in this process and return the exit code."""
    kept, sys.argv = sys.argv, [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.argv = kept
    return 0


def perturb_op_results(seed: int) -> None:
    """From now on, put every op's results and gradients a few roundings off, as those of another kernel would be. The errors depend on ``seed``.

    A kernel that adds in another order has an error of some units in the last place of the terms, not of their sum. So the error also depends on the
    size of the whole tensor, and is relatively larger for small elements.
    """
    import torch
    from torch.utils._pytree import tree_leaves, tree_map_only

    from kernels.contract import registry

    def off(x: torch.Tensor) -> torch.Tensor:
        """Return values from -1 to 1 that depend on each element's place and value."""
        place = torch.arange(x.numel(), device=x.device, dtype=torch.float64).reshape(x.shape)
        return torch.sin(place * 12.9898 + x.detach().double() * 78233.0 + seed)

    def moved(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point() or not x.numel():
            return x
        unit = ROUNDINGS * torch.finfo(x.dtype).eps
        size = x.detach().double().square().mean().sqrt()
        return (x.double() + unit * (x.detach().double().abs() + size) * off(x)).to(x.dtype)

    class Results(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return moved(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    class Gradients(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return moved(gradient)

    def disturbed(op: registry.Op, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            arguments = tree_map_only(torch.Tensor, Gradients.apply, arguments)
            return tree_map_only(torch.Tensor, Results.apply, function(*arguments))

        def written_to(*arguments: Any) -> None:
            written = [x for x in tree_leaves([arguments[n] for n in op.writes]) if isinstance(x, torch.Tensor)]
            before = [x.detach().clone() for x in written]
            function(*arguments)
            with torch.no_grad():
                for x, old in zip(
                    written, before
                ):  # a relative error: a second moment stays positive, a skipped step changes nothing
                    share = 1 + torch.finfo(x.dtype).eps * off(x)  # a quarter of that would always be rounded away
                    x.copy_(torch.where(x == old, x, (x * share).to(x.dtype)))

        return written_to if op.writes else called

    bind = registry.bind_ops

    def bind_disturbed(*arguments: Any, **named: Any) -> registry.Ops:
        ops = bind(*arguments, **named)
        # Not the functions that prepare an op's arguments, which round nothing.
        return replace(ops, **{name: disturbed(registry.find_op(name), getattr(ops, name)) for name in registry.OPS})

    registry.bind_ops = bind_disturbed


def run_ranks(rank_count: int, run: Callable[[], int]) -> int:
    """Call ``run`` in one fork of this process for each rank. Returns the first exit code that is not 0, or 0.

    This process imports torch for all of them, which takes longer than the runs. It has the store through which ranks find one another, as torchrun
    does. Each segment forms a new process group in the store.
    """
    from torch.distributed import TCPStore

    ranks = [_fork_rank(rank, rank_count, run) for rank in range(rank_count)]
    store = TCPStore("127.0.0.1", 0, is_master=True)  # after the forks: it starts a thread
    for _, port in ranks:
        os.write(port, str(store.port).encode())
        os.close(port)
    ends = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process, _ in ranks]
    return next((code for code in ends if code), 0)


def _fork_rank(rank: int, rank_count: int, run: Callable[[], int]) -> tuple[int, int]:
    """Fork one rank. Returns its process id, and the descriptor to which the store's port is written."""
    port, told = os.pipe()
    if process := os.fork():
        os.close(port)
        return process, told
    code = 1
    try:
        os.close(told)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(rank_count),
            "LOCAL_WORLD_SIZE": str(rank_count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": os.read(port, 16).decode(),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_request(request: dict[str, Any], recorder: Any, out: Path) -> int:
    """Train the folders and run the tools of a request in this process, and write the record and the exit codes to ``out``. Returns 0."""
    if request["watched"]:
        recorder.watch_imports()
        recorder.watch_compiler()
    import torch

    torch.compile = functools.partial(torch.compile, backend="eager")
    if request["disturbed"]:
        perturb_op_results(request["disturbed"])
    if request["watched"]:
        recorder.start()
    codes = []
    for work, entries in ((train_segment_folder, request["folders"]), (run_tool, request["tools"])):
        for entry in entries:
            try:
                codes.append(work(**entry | {"folder": Path(entry["folder"])}))
            except BaseException as error:  # the next case still runs
                print(f"{entry['folder']}: {type(error).__name__}: {error}", file=sys.stderr)
                codes.append(-1)
    recorder.stop()
    left = {"executed": recorder.to_json(), "codes": codes}
    (out / f"rank-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(left))
    return 0


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[2]).read_text())
    watcher = runpy.run_path(sys.argv[1])["ExecutionRecorder"](os.getcwd(), asked["watched"])
    job = functools.partial(run_request, asked, watcher, Path(sys.argv[3]))
    if asked["ranks"] > 1:
        import torch.distributed

        if asked["watched"]:
            import torch._dynamo.symbolic_convert  # noqa: F401 - for all ranks
        sys.exit(run_ranks(asked["ranks"], job))
    sys.exit(job())
