"""The state of a running segment, and its training step: ``launch_step`` launches a step's work on the device, and ``read_finished_steps`` fetches
the numbers of launched steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.contract.bench import BenchSetting
from kernels.contract.precision import FP8
from kernels.contract.registry import bind_ops, find_implementations_in_use, list_idle_ops, load_choice, load_fallback
from trainer.batch import Batch
from trainer.checkpoint_writer import CheckpointWriter, count_host_bytes
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.format import NOTHING_UNCHANGED, Regions, SkippedCheckpoint, Tensors, UnchangedWeights
from trainer.contract.checkpoint.model_function_changes import refuse_unaccepted_changes
from trainer.contract.checkpoint.region import Region
from trainer.contract.data.data_order import DataOrder, Row
from trainer.contract.errors import CheckpointError
from trainer.contract.lora import is_lora_tensor
from trainer.contract.plan.precision import DTYPES, refuse_unsupported_precision
from trainer.contract.plan.spec import SegmentSpec
from trainer.contract.recipe import is_trained, list_frozen
from trainer.cuda_graphs import CudaGraphCapture, GraphCapture, GraphReplayer, decide_use_of_graphs
from trainer.frozen_weights import compute_crc, describe_unchanged, iterate_weights, open_weights, read_adapt_recipe
from trainer.model.multi_token import MultiTokenObjective
from trainer.model.transformer import Decoder
from trainer.monitor.hook import StepHook, UpdateOutcome, WeightUpdate, copy_numbers_to_host
from trainer.monitor.metrics import device_name, measure_peak_memory_bytes
from trainer.monitor.monitor import UpdateMonitor
from trainer.monitor.signals import InstabilitySignals, LayerInputs
from trainer.monitor.stability import StabilityDetector, ThroughputDetector, decide_clip_and_skip
from trainer.optim.optimizer import Optimizer, compute_sums_of_squares
from trainer.optim.schedule import compute_lr_share
from trainer.parallel.ranks import Ranks, get_local_part, is_first_rank_with_part
from trainer.parallel.replicas import find_differing_tensors


class BatchSums:
    """Sums over the rows of a batch. They are views of one fp32 tensor on the device, so that a single all-reduce sums them over the ranks."""

    def __init__(self, all: Tensor, domains: int) -> None:
        """``all``: [loss, nll by domain…, supervised tokens by domain…, supervised tokens of the first half, ``MultiTokenObjective.sums``…]."""
        self.all = all
        self.loss = all[0]  # auxiliary losses included
        self.nll_D = all[1 : 1 + domains]
        self.supervised_D = all[1 + domains : 1 + 2 * domains]
        self.supervised_in_half = all[1 + 2 * domains]  # 0 unless the monitor keeps the first half's gradients
        self.multi_token = all[2 + 2 * domains :]  # empty unless layers for multi-token prediction are trained

    def list_sums_by_name(self) -> dict[str, Tensor]:
        return {name: view for name, view in vars(self).items() if name != "all"}


@dataclass(frozen=True)
class LaunchedStep:
    """A step whose work was launched. Its numbers stay on the device until they are read."""

    step: int
    rows: list[Row]  # of the global batch
    supervised: int  # as a ``Batch`` has them
    used: int
    state_after: dict[str, Any]
    lr: float
    numbers: list[dict[str, Tensor]]  # the step's own, and those of each hook


def make_multi_token_fields(sums: list[float]) -> dict[str, float]:
    """The fields of a step's record about multi-token prediction, from ``MultiTokenObjective.sums``: ``multi_token_loss``, the mean over the layers
    of their losses, and with several layers also ``multi_token_loss/1`` and so on. A layer without targets has no loss.

    >>> make_multi_token_fields([0.3, 6.0, 8.0, 2.0, 2.0])
    {'multi_token_loss': 3.5, 'multi_token_loss/1': 3.0, 'multi_token_loss/2': 4.0}
    """
    depths = len(sums) // 2
    nlls, counts = sums[1 : 1 + depths], sums[1 + depths :]
    found = {
        f"multi_token_loss/{depth}": nll / count
        for depth, (nll, count) in enumerate(zip(nlls, counts, strict=True), start=1)
        if count
    }
    if not found:
        return {}
    return {"multi_token_loss": sum(found.values()) / len(found)} | (found if depths > 1 else {})


class SegmentRun:
    """The state of a running segment. ``start``: the folder of the checkpoint to resume from; None: the weights are initialised."""

    def __init__(self, spec: SegmentSpec, ranks: Ranks, start: Path | None) -> None:
        self.spec, self.ranks, self.start = spec, ranks, start
        recipe = self.recipe = spec.recipe
        dtype = DTYPES[recipe.precision]
        # A start checkpoint has the frozen matrices unrounded, and saves take them from there.
        frozen_dtype = torch.float32 if start is None else dtype
        choice, fallback = load_choice(spec.kernels_path, ranks.device.type), load_fallback(spec.kernels_path)
        idle = list_idle_ops(recipe.model.model_dump())
        ops = bind_ops(choice, ranks.device, dtype, recipe.compile, fallback, idle)
        shape = BenchSetting.from_recipe_mapping(recipe.model_dump()).shape
        self.kernels = find_implementations_in_use(choice, ranks.device, dtype, recipe.compile, fallback, shape, idle)
        # on the meta device only if the model is distributed: leaving it, torch imports sympy, which takes half a second
        with torch.device("meta" if ranks.mesh is not None else ranks.device):
            share = recipe.stability.embedding_grad_share
            self.model = Decoder(
                recipe.model, ops, dtype, ranks.tensor, share, recipe.adapt, recipe.frozen, frozen_dtype
            )
        if ranks.mesh is not None:
            from trainer.parallel.fsdp_sharding import shard_parameters

            shard_parameters(self.model, self.model.every_block, ranks, dtype)
            self.model.to_empty(device=ranks.device)
        self.model.place_constants(ranks.device)
        self.parameters = dict(self.model.named_parameters())  # trained or not
        width_share = recipe.model.mup_width_ratio
        self.optimizer = Optimizer(self.model, recipe.optimizer, width_share, ops.adamw, ops.newton_schulz)
        self.monitor = UpdateMonitor(self.optimizer, ranks)
        self.detector = StabilityDetector(recipe.stability)
        self.throughput = ThroughputDetector(recipe.stability, f"{ranks.size} × {device_name(ranks.device)}")
        self.signals = InstabilitySignals(recipe, self.model, ranks)
        self.hooks: list[StepHook] = [self.monitor, self.detector, self.signals, self.throughput]
        self.counters: dict[str, Any] = {
            "tokens": 0,
            "supervised_tokens": 0,
            "documents": 0,
            "updates": 0,
            "seconds": 0.0,
        }
        self.at_start = dict(self.counters)
        self.sums_at_start: dict[str, int] = {}  # CRC-32 of this rank's part of each frozen weight of ``start``
        self.skipped: list[SkippedCheckpoint] = []  # checkpoints of this segment that could not be loaded
        self.stop_asked = False
        self.writer: CheckpointWriter | None = None  # an update waits until the writer has copied the tensors
        torch.manual_seed(recipe.seed)
        state = self._restore(start) if start is not None else None
        if state is None:
            self.model.initialise(recipe.seed)
        restarts = spec.restart_data and (state is None or state["step"] == spec.first_step)
        self.order = DataOrder(
            spec.data_plan,
            context=recipe.model.context,
            batch=recipe.batch,
            vocab_size=recipe.model.vocab_size,
            state=state.get("sampler") if state is not None and not restarts else None,
        )
        if restarts:  # the count of its documents too
            self.order.step = spec.first_step
            self.counters["documents"] = self.at_start["documents"] = 0
        self.step = self.order.step
        self.sampler = self.order.state_dict()
        self.launched: list[LaunchedStep] = []  # steps whose numbers are not read yet
        domains, depths = len(self.order.domains), recipe.trained_multi_token_layers
        self.sums = BatchSums(  # of the step under way
            torch.zeros(2 + 2 * domains + (1 + 2 * depths if depths else 0), device=ranks.device), domains
        )
        self.objective: MultiTokenObjective | None = None
        if depths:
            self.objective = MultiTokenObjective(recipe.multi_token_weight, self.sums.multi_token)
        self.domains_D1 = torch.arange(len(self.order.domains), device=ranks.device)[:, None]
        self.graphs: GraphReplayer[LayerInputs] | None = None
        if ranks.mesh is None and ranks.device.type == "cpu":
            self.model.join_matrices()
        if recipe.precision == FP8:
            refuse_unsupported_precision(recipe, ranks.device)
            self.model.use_fp8()
        if recipe.parallel.recompute == "block":
            self.model.use_recomputation()
        if recipe.compile:
            self.model.compile(2 * (1 + len(recipe.batch.warmup)))  # each batch whole and halved
        if decide_use_of_graphs(recipe, ranks, dtype.itemsize):
            self.use_graphs(CudaGraphCapture())

    def train_step(self, batch: Batch) -> dict[str, Any]:
        """Train one step and wait for it. Returns its record, as ``read_finished_steps`` does."""
        self.launch_step(batch)
        ((_, record),) = self.read_finished_steps()
        return record

    def launch_step(self, batch: Batch) -> None:
        """Launch one step without waiting for the device. A batch without targets changes no weight."""
        recipe, spec = self.recipe, self.spec
        lr = recipe.optimizer.lr * compute_lr_share(
            recipe, spec.kind, batch.step, spec.first_step, spec.last_step, spec.rewarm
        )
        self.signals.begin_step(self.monitor.find_layer_to_measure(batch.step))
        sums, load = self._backward(batch)
        gradients = self.optimizer.gradients()
        sums, squares_P, stop = self._over_ranks(sums, compute_sums_of_squares(gradients) * self.monitor.shares)
        norm = squares_P.sum().sqrt()
        targets, limit = sums.supervised_D.sum(), self.detector.compute_grad_norm_limit()
        divide_by, skip = decide_clip_and_skip(sums.loss, norm, recipe.stability.grad_clip, limit, targets)
        update = WeightUpdate(batch.step, gradients, squares_P, load)
        for hook in self.hooks:
            hook.before_update(update)
        if self.writer is not None:
            self.writer.wait_until_copied()
        self.optimizer.step(lr, divide_by, skip)
        self._balance(load, skip)
        self.optimizer.zero_grad()
        own = {"grad_norm": norm, "skipped": skip, "stop": stop, **sums.list_sums_by_name()}
        numbers = [own, *(hook.after_update(update) for hook in self.hooks)]
        self.launched.append(
            LaunchedStep(batch.step, batch.rows, batch.supervised, batch.used, batch.state_after, lr, numbers)
        )

    def read_finished_steps(self) -> Iterator[tuple[LaunchedStep, dict[str, Any]]]:
        """Yields each step launched since the last call, with its record (without rates and times). One transfer fetches the numbers of all steps.
        It is the only wait for the device.

        The records are made one by one: call ``StepHook.after_step`` with a record before taking the next one. A step without targets has no loss.
        """
        steps, self.launched = self.launched, []
        return self._records(steps, copy_numbers_to_host(*(numbers for step in steps for numbers in step.numbers)))

    def _records(
        self, steps: list[LaunchedStep], values: list[dict[str, list[float]]]
    ) -> Iterator[tuple[LaunchedStep, dict[str, Any]]]:
        left = iter(values)
        for step in steps:
            own, *of_hooks = islice(left, len(step.numbers))
            yield step, self._record(step, own, of_hooks)

    def _record(
        self, step: LaunchedStep, own: dict[str, list[float]], of_hooks: list[dict[str, list[float]]]
    ) -> dict[str, Any]:
        (grad_norm,), (skipped,), (stop_asked,) = own["grad_norm"], map(bool, own["skipped"]), own["stop"]
        (total,), (in_half,) = own["loss"], own["supervised_in_half"]
        by_domain = list(zip(self.order.domains, own["nll_D"], own["supervised_D"], strict=True))
        counted = sum(own["supervised_D"])
        loss = sum(own["nll_D"]) / max(1.0, counted)
        outcome = UpdateOutcome(step.supervised, in_half, skipped, {name: count for name, _, count in by_domain})
        self.stop_asked = bool(stop_asked)
        self.counters["tokens"] += step.used
        self.counters["supervised_tokens"] += step.supervised
        self.counters["documents"] = step.state_after["documents_begun"]
        self.counters["updates"] += not skipped
        self.step, self.sampler = step.step + 1, step.state_after
        record = {
            "step": step.step,
            "kind": self.spec.kind,
            "tokens": self.counters["tokens"],
            "supervised_tokens": self.counters["supervised_tokens"],
            **({"loss": loss, "z_loss": total - loss - sum(own["multi_token"][:1])} if counted else {}),
            **make_multi_token_fields(own["multi_token"]),
            **{f"loss/{name}": nll / count for name, nll, count in by_domain if count},
            "grad_norm": grad_norm,
        }
        for hook, numbers in zip(self.hooks, of_hooks, strict=True):
            record |= hook.record(numbers, outcome)
        return record | {"lr": step.lr, "skipped": skipped, "memory": measure_peak_memory_bytes(self.ranks.device)}

    def _over_ranks(self, sums: BatchSums, squares_P: Tensor) -> tuple[BatchSums, Tensor, Tensor]:
        """Sum over all ranks, in one message: ``sums``, ``squares_P``, ``stop_asked`` and each rank's measurements for ``signals``.

        Returns (the sums, the squares, a number that is above 0 if some rank was asked to stop).
        """
        stop = sums.all.new_full((1,), float(self.stop_asked))
        by_rank = self.signals.by_rank
        message = torch.cat((sums.all, squares_P, stop, by_rank.flatten()))
        self.ranks.sum_over_ranks_in_place(message)
        summed, squares_P, stop, of_ranks = message.split((len(sums.all), len(squares_P), 1, by_rank.numel()))
        self.signals.by_rank = of_ranks.view_as(by_rank)
        return BatchSums(summed, len(self.order.domains)), squares_P, stop

    def _backward(self, batch: Batch) -> tuple[BatchSums, Tensor | None]:
        """Compute the gradients of this rank's rows. Returns (sums over its rows, its tokens at each expert [expert layers, experts] or None)."""
        sums, load = self.sums, None
        sums.all.zero_()
        experts = self.recipe.model.experts
        router_z_share = experts.z_loss / (len(batch.rows) * self.recipe.model.context) if experts else 0.0
        balance_share = experts.loss_weight / len(batch.rows) if experts else 0.0
        rows, split = self._rows_at_once(batch)
        parts = batch.split_into_micro_batches(rows)
        for done, part in enumerate(parts, start=1):
            found = None
            if self.graphs is None:
                found = self._micro_batch(part, router_z_share, balance_share)
            else:
                self.signals.measure_inputs(self.graphs(part))
            if done == len(parts) // 2 and self.monitor.after_half_batch(batch.step, split):
                sums.supervised_in_half.copy_(sums.supervised_D.sum())
            if found is not None:
                load = found if load is None else load + found
        return sums, load

    def _micro_batch(
        self, part: dict[str, Any], router_z_share: float = 0.0, balance_share: float = 0.0
    ) -> Tensor | None:
        """Add a micro-batch's gradients to those of the parameters, and its sums to ``sums``. Returns the number of tokens at each expert
        [expert layers, experts], or None."""
        part_of, sums = self.model.tensor.take_own_positions, self.sums
        domains_BS = part_of(part.pop("domains_BT"))
        z_loss = self.recipe.stability.z_loss
        loss, nll_BS, load = self.model.loss(
            **part,
            z_loss=z_loss,
            router_z_share=router_z_share,
            balance_share=balance_share,
            objective=self.objective,
        )
        loss.backward()  # type: ignore[no-untyped-call]
        carries_N = part_of(part["weights_BT"]).flatten() > 0
        # no indexing by a mask, which would wait for the device; no scattered adds, whose order may change
        counts_DN = (domains_BS.flatten() == self.domains_D1) & carries_N
        sums.loss.add_(loss.detach())
        sums.nll_D.add_(torch.where(counts_DN, nll_BS.flatten(), 0.0).sum(1))
        sums.supervised_D.add_(counts_DN.sum(1))
        return load

    def use_graphs(self, capture: GraphCapture) -> None:
        """Compute micro-batches by replaying CUDA graphs from now on (``trainer.cuda_graphs``). Only for a dense model on one rank."""

        def kept(part: dict[str, Any]) -> LayerInputs:
            """Run a micro-batch. Returns the tensors that its layers left for ``signals``."""
            found: LayerInputs = {}
            self.signals.kept = found
            self._micro_batch(part)
            return found

        self.graphs = GraphReplayer(kept, [*self.optimizer.allocate_lasting_gradients(), self.sums.all], capture)

    def _rows_at_once(self, batch: Batch) -> tuple[int, bool]:
        """(number of rows of a micro-batch, True if the only micro-batch is split in two to measure the noise scale)."""
        rows = len(batch.tokens_BT)
        micro = self.recipe.batch.micro_sequences or rows
        every = self.recipe.stability.noise_scale_every
        split = micro >= rows and rows % 2 == 0 and every > 0 and (batch.step + 1) % every == 0
        return (rows // 2 if split else micro), split

    def _balance(self, load: Tensor | None, skip: Tensor) -> None:
        """Update the biases of the routers from the number of tokens that each expert got in the global batch."""
        if load is None:
            return
        assert self.recipe.model.experts is not None
        from trainer.model.experts import update_router_bias

        self.ranks.sum_over_ranks_in_place(load)
        biases = [
            (is_trained(name, self.recipe.adapt, self.recipe.frozen), bias) for name, bias in self.model.named_buffers()
        ]
        for (trained, bias_E), load_E in zip(biases, load):
            if trained:
                update_router_bias(bias_E, load_E, self.recipe.model.experts.bias_rate, skip)

    def save(self, is_last: bool = False) -> None:
        """Begin to save a checkpoint. The caller may launch further steps while it is written, unless it is the last one."""
        assert self.writer is not None
        state = {
            "step": self.step,
            "kind": self.spec.kind,
            "recipe": self.recipe.model_dump(),
            "data_plan": self.spec.data_plan.id,
            "code_commit": self.spec.code_commit,
            "first_step": self.spec.first_step,
            "sampler": self.sampler,
            **{hook.key: hook.state_dict() for hook in self.hooks},
            "counters": dict(self.counters),
            "at_start": self.at_start,
            "skipped": [asdict(bad) for bad in self.skipped],
        }
        contents, regions = self.collect_checkpoint_contents()
        self.writer.begin_save(self.step, contents, regions, state, is_last)

    def collect_checkpoint_contents(self) -> tuple[dict[str, Tensors], Regions]:
        """This rank's part of a checkpoint: (tensors by kind, the region of each in its whole tensor).

        The leader's part also has the tensors that are not split: buffers, counts of steps and the random state. Parameters and moments are not
        copied: they are the tensors that training changes. The weights of ``list_unchanged`` are not among them.
        """
        model: Tensors = {}
        optimizer: Tensors = {}
        regions = self.find_tensor_regions()
        state = self.optimizer.state_tensors()
        for name, parameter in self.parameters.items():
            if is_first_rank_with_part(parameter):
                if name not in self.sums_at_start:
                    model[name] = get_local_part(parameter)
                keys = [f"{key}.{name}" for key in ("exp_avg", "exp_avg_sq", "momentum")]
                optimizer |= {key: state[key] for key in keys if key in state}
        if self.ranks.is_leader:
            model |= {name: buffer.clone() for name, buffer in self.model.named_buffers()}
            optimizer |= {key: value.clone() for key, value in state.items() if key.startswith("step.")}
            optimizer["rng"] = torch.get_rng_state()
        return {"model": model, "optimizer": optimizer}, regions

    def count_checkpoint_bytes(self) -> int:
        """Bytes of host memory that a copy of ``collect_checkpoint_contents`` takes once every parameter has its moments. (Before the first step
        AdamW has none.)"""
        moments = {"adamw": 2, "muon": 1}
        held: list[Tensor] = []
        changing = [weight for name, weight in self.parameters.items() if name not in self.sums_at_start]
        held += [get_local_part(weight) for weight in changing if is_first_rank_with_part(weight)]
        for row in self.optimizer.table:
            parameter = self.optimizer.parameters[row.parameter]
            if is_first_rank_with_part(parameter):
                held += [get_local_part(parameter)] * moments[row.rule]
            if self.ranks.is_leader and row.rule == "adamw":
                held.append(torch.zeros(()))  # its count of steps
        if self.ranks.is_leader:
            held += [*self.model.buffers(), torch.get_rng_state()]
        return count_host_bytes(held)

    def list_unchanged(self) -> UnchangedWeights:
        """This rank's part of the frozen weights, as ``start`` has them. Without ``start``, there are none."""
        if self.start is None or not self.sums_at_start:
            return NOTHING_UNCHANGED
        held = {name: self.parameters[name] for name in self.sums_at_start}
        shapes = {n: tuple(get_local_part(held[n]).shape) for n in held if is_first_rank_with_part(held[n])}
        weights = open_weights(self.start, self.recipe.adapt, self.find_tensor_regions())
        return describe_unchanged(self.start, weights, self.sums_at_start, shapes)

    def find_tensor_regions(self) -> Regions:
        """The region of each parameter, and of each optimiser tensor that is split like its parameter."""
        found: Regions = {}
        for name, parameter in self.parameters.items():
            keys = (name, *(f"{key}.{name}" for key in ("exp_avg", "exp_avg_sq", "momentum")))
            found |= dict.fromkeys(keys, Region.from_tensor(parameter))
        return found

    def find_differing_replicas(self) -> list[str]:
        """The names of weights and moments whose copies on two ranks differ. The copies should be equal. Every rank must call it."""
        held = {name: get_local_part(parameter) for name, parameter in self.parameters.items()}
        held |= self.optimizer.state_tensors()
        return find_differing_tensors(
            {key: (region, held[key]) for key, region in self.find_tensor_regions().items() if key in held}, self.ranks
        )

    def _restore(self, start: Path) -> dict[str, Any]:
        """Load a checkpoint. Returns its state. Raises: CheckpointError that names the first parameter that does not fit."""
        state = checkpoints.read_checkpoint_state(start)
        trained = (state.get("recipe") or {}).get("model")
        if trained:  # an older or hand-made checkpoint may lack it: planning then compares the ledger's recipe
            refuse_unaccepted_changes(trained, self.recipe.model, self.recipe.accept_changes, start)
        regions = self.find_tensor_regions()
        before, adapted = state.get("recipe") or {}, read_adapt_recipe(state)
        model = open_weights(start, self.recipe.adapt, regions)
        names = self.parameters.keys() | {name for name, _ in self.model.named_buffers()}
        if adapted != self.recipe.adapt:
            names = {name for name in names if not is_lora_tensor(name)}
        if other := sorted(names ^ model.keys()):
            raise CheckpointError(
                "trainer.other_model",
                "recipe.model does not fit the checkpoint: only {holder} has the tensor {name}.",
                holder="the recipe" if other[0] in names else "the checkpoint",
                name=other[0],
            )
        with torch.no_grad():
            buffers = dict(self.model.named_buffers())
            for name, found in iterate_weights(start, model, regions):
                parameter = self.parameters.get(name)
                (buffers[name] if parameter is None else get_local_part(parameter)).copy_(found)
                if parameter is not None and not parameter.requires_grad:
                    self.sums_at_start[name] = compute_crc(found)
                del found  # before the next one is read
        if adapted != self.recipe.adapt:
            self.model.initialise_lora(self.recipe.seed, model)
        if state["kind"] == checkpoints.IMPORT:
            return state  # weights only: optimiser, hooks, counters and random state stay those of a first step
        frozen = list_frozen(before.get("freeze", []), before.get("multi_token_weight", 0.0))
        was_trained = lambda name: is_trained(name, before.get("adapt"), frozen)
        changed = adapted != self.recipe.adapt
        untrained = {name for name in self.optimizer.parameters if changed or not was_trained(name)}
        held = {key: region for key, region in regions.items() if key.partition(".")[2] not in untrained}
        optimizer = checkpoints.read_tensors(start, "optimizer", held)
        torch.set_rng_state(optimizer.pop("rng"))
        try:
            self.optimizer.load_state_tensors(optimizer, untrained)
        except KeyError as missing:
            raise CheckpointError(
                "trainer.other_optimizer",
                "recipe.optimizer does not fit the checkpoint: the checkpoint has no tensor {name}.",
                name=str(missing),
            ) from None
        for hook in self.hooks:
            if hook.key in state:
                hook.load_state_dict(state[hook.key])
            elif hook.required:
                raise CheckpointError(
                    "trainer.no_hook_state",
                    "state.json of checkpoint {file} has no key '{key}'.",
                    file=str(start),
                    key=hook.key,
                )
        self.counters = dict(state["counters"])
        same_segment = (state["kind"], state["first_step"]) == (self.spec.kind, self.spec.first_step)
        if same_segment and state["step"] > self.spec.first_step:
            self.at_start = state["at_start"]
            self.skipped = [SkippedCheckpoint(**bad) for bad in state["skipped"]]
        else:
            self.at_start = dict(self.counters)
        return state
