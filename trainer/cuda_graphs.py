"""CUDA graphs: the launches of a micro-batch's forward and backward, recorded once for each shape and replayed after that.

A launch takes the host about 4 µs, and a step of a 16-layer model has about 1,500 launches. If kernels take less time than their launches, the
GPU waits for the host. A replay is one launch. It repeats the same kernels on the same addresses, and runs no Python. Therefore:

- The function's inputs are copied into tensors that stay (``GraphRecording.inputs``). The key of a recording is the inputs' shapes, and the
  values of inputs that are not tensors.
- The function adds its results to tensors that stay: gradients, which are zeroed in place between two steps, and the sums of the step.
- The function returns the other tensors that are read after a replay. Each replay overwrites them.
- The function draws no random numbers and does not wait for the device. A call that waits (``nonzero``, ``item``) makes the recording fail.

The first micro-batches of a shape run without a graph, on a second stream, so that kernels are compiled and workspaces are allocated. The next
micro-batch is recorded, and is computed both with and without the graph. The recording is used only if both give the same results. If a
recording fails or its results differ, the run continues without graphs and prints one line that says why.

A CPU launches nothing. There, tests cover everything but ``CudaGraphCapture``, with a capture that calls the function again.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from kernels.contract.message import Message
from trainer.contract.recipe import Recipe
from trainer.parallel.ranks import Ranks

LAUNCH_SECONDS = 4e-6  # the host's time to launch a kernel
BYTES_PER_SECOND = 2e12  # the memory rate of a small kernel on an H100 (its data sheet says 3.35e12)
WARM_UPS = 3  # as torch.cuda.make_graphed_callables has it
MOST = 8  # number of shapes that are recorded: each recording holds memory
ALIKE = 0.05  # share of a tensor's norm that a replay may differ by: atomic additions change the order of sums

GraphOutput = TypeVar("GraphOutput")
Key = tuple[Any, ...]


class GraphCapture(Protocol):
    """A way to warm up and to record a function: CUDA graphs, or a stand-in for tests on a CPU."""

    def warm_up(self, function: Callable[[], GraphOutput]) -> GraphOutput: ...

    def record(self, function: Callable[[], GraphOutput]) -> Callable[[], GraphOutput]:
        """Record ``function``. Returns a function that replays it. Raises: RuntimeError if it cannot be recorded. Then nothing has changed."""
        ...


class CudaGraphCapture:
    """Records CUDA graphs as torch's notes "CUDA semantics" describe. The graphs share memory: no graph reads the results of another."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.side_stream = torch.cuda.Stream()

    def warm_up(self, function: Callable[[], GraphOutput]) -> GraphOutput:
        usual = torch.cuda.current_stream()
        self.side_stream.wait_stream(usual)
        with torch.cuda.stream(self.side_stream):
            left = function()
        usual.wait_stream(self.side_stream)
        return left

    def record(self, function: Callable[[], GraphOutput]) -> Callable[[], GraphOutput]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: the threads that fetch batches and write checkpoints may continue
        recording = torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local")
        try:
            # torch.cuda.graph stays on its own stream if it cannot end
            with torch.cuda.stream(torch.cuda.current_stream()), recording:
                left = function()
        except RuntimeError:
            # the allocator would stay in the state of a recording, and never again free memory that several streams used
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool)
                torch._C._cuda_releasePool(torch.cuda.current_device(), self.pool)
            raise

        def replay() -> GraphOutput:
            graph.replay()
            return left

        return replay


@dataclass
class GraphRecording(Generic[GraphOutput]):
    """The recording of one shape."""

    inputs: dict[str, Any]
    seen: int = 0  # micro-batches so far
    replay: Callable[[], GraphOutput] | None = None


class GraphReplayer(Generic[GraphOutput]):
    """Calls ``function``, or replays it if these inputs have a recording. Inputs are tensors and other values, by name."""

    def __init__(
        self, function: Callable[[dict[str, Any]], GraphOutput], adds_to: Sequence[Tensor], capture: GraphCapture
    ) -> None:
        """``adds_to``: all tensors to which the function adds its results. They must be the same tensors in every call."""
        self.function, self.adds_to, self.capture = function, list(adds_to), capture
        self.recorded: dict[Key, GraphRecording[GraphOutput]] = {}
        self.replays = 0
        self.why_not = ""  # the reason why graphs are not used; '' while they are used

    def __call__(self, inputs: Mapping[str, Any]) -> GraphOutput:
        key = make_recording_key(inputs)
        found = self.recorded.get(key)
        if self.why_not or (found is None and len(self.recorded) == MOST):
            return self.function(dict(inputs))
        if found is None:
            found = self.recorded[key] = GraphRecording(
                {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
            )
        found.seen += 1
        if found.replay is None and found.seen > WARM_UPS:
            return self._record(found, inputs)
        copy_inputs_to_recording(found.inputs, inputs)
        if found.replay is None:
            return self.capture.warm_up(lambda: self.function(dict(found.inputs)))
        self.replays += 1
        return found.replay()

    def _record(self, found: GraphRecording[GraphOutput], inputs: Mapping[str, Any]) -> GraphOutput:
        """Record the function with the previous inputs, then compare a replay with a call, both with ``inputs``. Returns one of their results."""
        run = lambda: self.function(dict(found.inputs))
        replay: Callable[[], GraphOutput] | None = None
        try:
            replay = self.capture.record(run)
        except RuntimeError as error:
            self._give_up(" ".join(str(error).split())[:200])
        copy_inputs_to_recording(found.inputs, inputs)
        if replay is None:
            return run()
        before = [tensor.clone() for tensor in self.adds_to]
        torch._foreach_zero_(self.adds_to)
        left = run()
        expected = [tensor.clone() for tensor in self.adds_to]
        torch._foreach_zero_(self.adds_to)
        left_by_replay = replay()
        verdict = are_nearly_equal(self.adds_to, expected)
        if verdict:
            found.replay, left = replay, left_by_replay
        else:
            torch._foreach_copy_(self.adds_to, expected)
        torch._foreach_add_(self.adds_to, before)
        if verdict is False:
            self._give_up(
                Message(
                    "trainer.replay_differs",
                    "the results of a recorded graph differ from those of the same computation without a graph",
                )
            )
        return left

    def _give_up(self, why: str) -> None:
        self.why_not = why
        self.recorded.clear()
        said = Message("trainer.no_graphs", "the run continues without CUDA graphs: {why}", why=why)
        print(said, file=sys.stderr, flush=True)


def make_recording_key(inputs: Mapping[str, Any]) -> Key:
    """The key of a recording: names, shapes, dtypes and strides of tensors, and the values of all other inputs."""
    return tuple(
        (name, value.shape, value.dtype, value.stride()) if isinstance(value, Tensor) else (name, value)
        for name, value in sorted(inputs.items())
    )


def copy_inputs_to_recording(recorded: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Copy the inputs into the tensors of a recording."""
    for name, value in recorded.items():
        if isinstance(value, Tensor):
            value.copy_(inputs[name], non_blocking=True)


def are_nearly_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool | None:
    """True if each tensor differs from the expected one by at most ``ALIKE`` of its norm. None if the expected values are not finite."""
    norms = torch.stack(torch._foreach_norm(list(expected)))
    apart = torch.stack(torch._foreach_norm(torch._foreach_sub(list(found), list(expected))))
    finite, within = torch.stack((norms.isfinite().all(), (apart <= ALIKE * norms).all())).tolist()
    return bool(within) if finite else None


def is_launch_bound(tokens: int, width: int, bytes_each: int) -> bool:
    """True if launching a kernel takes longer than running it. The kernel is one that reads and writes the activations of a micro-batch once.

    ``bytes_each``: bytes of an activation. In bf16 the bound is 2 million activations: 4 µs · 2 TB/s / (2 · 2 bytes). Matrix products, and
    kernels of the backward pass that read two tensors, take longer. Therefore graphs save less near the bound than far below it.

    >>> is_launch_bound(2048, 768, 2), is_launch_bound(4096, 768, 2)
    (True, False)
    """
    return tokens * width * 2 * bytes_each / BYTES_PER_SECOND < LAUNCH_SECONDS


def decide_use_of_graphs(recipe: Recipe, ranks: Ranks, bytes_each: int) -> bool:
    """True if a run with this recipe on these ranks uses CUDA graphs. ``bytes_each``: bytes of an activation."""
    rows = recipe.batch.micro_sequences or recipe.batch.sequences
    small = is_launch_bound(rows * recipe.model.context, recipe.model.d_model, bytes_each)
    possible = ranks.size == 1 and recipe.model.experts is None and recipe.parallel.recompute == "none"
    if recipe.cuda_graphs == "on" and ranks.size > 1 and ranks.is_leader:
        said = Message(
            "trainer.graphs_one_rank",
            "'cuda_graphs: on' has no effect in a run with {ranks} ranks: CUDA graphs are used only in a run with one rank",
            ranks=ranks.size,
        )
        print(said, file=sys.stderr, flush=True)
    chosen = recipe.cuda_graphs == "on" or (recipe.cuda_graphs == "auto" and small)
    return ranks.device.type == "cuda" and possible and chosen
