"""Hostile patches that a few training steps from one checkpoint do not reveal. The matrix of tiny runs reveals them, or lists them as not executed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.factory.matrix import Prepared, copy_of_code, find_removals, judge, prepare
from tests.support.paths import ROOT

Edits = tuple[str, list[tuple[str, str]], str]  # path, (text, in its place)…, the run that shows it

SCHEDULE, RUN, SEGMENT = "trainer/optim/schedule.py", "trainer/run.py", "trainer/segment.py"
STABILITY, MUON, ADAMW = "trainer/monitor/stability.py", "trainer/optim/muon.py", "kernels/adamw/__init__.py"
OPTIMIZER, EXPERTS, TRANSFORMER = (
    "trainer/optim/optimizer.py",
    "trainer/model/experts.py",
    "trainer/model/transformer.py",
)
FUSED = "cpu: {adamw: fused}\n"  # as kernels.yaml has it before anything is tuned
UPDATE = "        self.optimizer.step(lr, divide_by, skip)\n"
BACKWARD = "        loss.backward()  # type: ignore[no-untyped-call]\n"
GRADIENTS = "        gradients = self.optimizer.gradients()\n"

SELDOM_EXECUTED: dict[str, Edits] = {
    "an anneal that stays at its peak rate": (
        SCHEDULE, [("(step - first + 1) / (last - first + 1)", "(step - first + 1) // (last - first + 1)")], "anneal"),
    "a linear anneal that ends too high": (
        SCHEDULE, [('"linear": lambda done: 1 - done', '"linear": lambda done: 1 - done / 2')],
        "anneal, linear, with a mixture of its own"),
    "an anneal that is right for the matrix's own recipe": (
        SCHEDULE, [("compute_anneal_lr_share(schedule, step, first, last)\n", "compute_anneal_lr_share(schedule, step, first, last) ** (recipe.name == 'run')\n")], "anneal"),
    "warm-up lost": (SCHEDULE, [("min(1.0, (step + 1) / schedule.warmup_steps)", "1.0")], "first steps"),
    "re-warm lost": (
        SCHEDULE, [("if step - first + 1 >= schedule.rewarmup_steps:", "if step >= first:"),
                   ("    start = min(share, schedule.final_lr_share)\n    return start + (share - start) * (step - first + 1) / schedule.rewarmup_steps\n",
                    "    return share\n")],
        "trunk after an anneal"),
    "milestones ignored": (
        SCHEDULE, [("return reached[-1] if reached else 1.0", "return 1.0")], "milestones and mixture phases"),
    "a resume that begins anew": (
        SEGMENT, [("            return path, skipped\n", "            return None, skipped\n")], "resumed"),
    "a damaged checkpoint is trusted": (
        SEGMENT, [("        fault = find_checkpoint_fault_on_any_rank(path, ranks)\n", "        fault = ''\n")], "newest checkpoint damaged"),
    "the data begin again after a resume": (
        RUN, [('state=state.get("sampler") if state is not None and not restarts else None', "state=None")], "next generation"),
    "an outlier is not skipped": (
        STABILITY, [("torch.isfinite(loss) & torch.isfinite(grad_norm) & (grad_norm <= limit)",
                     "torch.isfinite(loss) & torch.isfinite(grad_norm)")], "outliers are skipped"),
    "a loss that is not finite is learnt from": (
        STABILITY, [("skip = torch.where(sound, 0.0, 1.0)", "skip = torch.zeros(())")], "a loss that is not finite"),
    "NaN times zero in the weights": (
        ADAMW, [("    torch._foreach_add_(steps, 1.0)\n    with swap_in_dense",
                 "    torch._foreach_add_(steps, 1.0)\n    for x, g in zip(weights, gradients):\n        x.add_(g * (1 - skip), alpha=0.0)\n    with swap_in_dense")],
        "a loss that is not finite"),
    "every 32nd step that is split has doubled gradients": (
        RUN, [(GRADIENTS, GRADIENTS + "        for gradient in gradients.values():\n            gradient.mul_(1.0 + (batch.step % 32 == 31))\n")], "a long run"),
    "a layer frozen after step 100 of a segment": (
        RUN, [(GRADIENTS, GRADIENTS + "        gradients['blocks.1.down'].mul_(float(batch.step < spec.first_step + 100))\n")],
        "a long run"),
    "a layer frozen after step 5000 of a segment": (
        RUN, [(GRADIENTS, GRADIENTS + "        gradients['blocks.1.down'].mul_(float(batch.step < spec.first_step + 5000))\n")],
        "far into a segment"),
    "checkpoints that are copied while the weights change": (
        "trainer/checkpoint_writer.py", [("        self._copied.wait()\n", "        self._copied.is_set()\n")], "threads that begin late"),
    "late steps are half steps": (
        RUN, [(UPDATE, "        self.optimizer.step(lr / (1 + (batch.step > 50_000)), divide_by, skip)\n")],
        "a hundred thousand steps on"),
    "Muon without its momentum": (
        MUON, [("torch._foreach_lerp(grads, means, recipe.momentum) if recipe.nesterov else means", "list(grads)")], "Muon"),
    "Muon without decay": (MUON, [("[1 - rate * decay[name] for", "[1.0 for")], "Muon"),
    "experts balanced the wrong way": (EXPERTS, [("rate * (load_E.mean() - load_E).sign()", "rate * (load_E - load_E.mean()).sign()")], "experts"),
    "ranks that do not add up their losses": (
        RUN, [("        self.ranks.sum_over_ranks_in_place(message)\n", "        message.mul_(self.ranks.size)\n")], "two ranks, split weights"),
    "half of the rows of a micro-batch": (
        RUN, [(BACKWARD, "        (loss * (1.0 + (self.sums.loss > 0))).backward()\n")], "micro-batches, batch warm-up"),
    "averages that forget the weights": (
        "trainer/tools/average.py", [("sums[name].add_(tensor.double(), alpha=weight)", "sums[name].add_(tensor.double(), alpha=1.0)")],
        "trainer.tools.average FIRST LAST --weights 1,3"),
}  # fmt: skip
UNTOLD: dict[str, Edits] = {
    "nine of ten metric lines": (
        SEGMENT, [('                    metrics.write(record | {"time": time.time()})\n',
                   '                    if step.step % 10 == 0:\n                        metrics.write(record | {"time": time.time()})\n')], "first steps"),
    "a better loss in result.json": (SEGMENT, [('"loss": mean("loss"),', '"loss": 0.9 * (mean("loss") or 0.0),')], "first steps"),
    "a better loss in the metrics": (RUN, [('({"loss": loss, ', '({"loss": loss * 0.99, ')], "anneal"),
    "anomalies that nobody hears of": (
        SEGMENT, [("for hook in run.hooks for anomaly in hook.after_step(record)", "for hook in run.hooks[:1] for anomaly in hook.after_step(record)")],
        "outliers are skipped"),
    "skipped steps that are not counted": (RUN, [('"skipped": skipped, "memory"', '"skipped": False, "memory"')], "outliers are skipped"),
    "more tokens than there were": (RUN, [('self.counters["tokens"] += step.used', 'self.counters["tokens"] += step.used + 1')], "first steps"),
}  # fmt: skip
BELOW_THE_OLD_BOUND: dict[str, Edits] = {
    "no clipping": (STABILITY, [("(grad_norm / clip).clamp(min=1.0)", "(grad_norm / clip).clamp(min=1.0, max=1.0)")], "first steps"),
    "no z-loss": (RUN, [("z_loss = self.recipe.stability.z_loss\n", "z_loss = 0.0\n")], "first steps"),
    "bf16 moments": (
        OPTIMIZER, [("        if self.muon is not None:\n            shares",
                     "        for kept in self.state.values():\n            for key in MOMENTS[:2]:\n                kept[key].copy_(kept[key].bfloat16())\n        if self.muon is not None:\n            shares")],
        "anneal"),
    "second moments in bf16": (
        OPTIMIZER, [("        if self.muon is not None:\n            shares",
                     "        for kept in self.state.values():\n            kept['exp_avg_sq'].copy_(kept['exp_avg_sq'].bfloat16())\n        if self.muon is not None:\n            shares")],
        "next generation"),
    "an fp32 recipe computed in bf16": (RUN, [("recipe.model, ops, dtype, ranks.tensor,", "recipe.model, ops, torch.bfloat16, ranks.tensor,")], "first steps"),
    "logits in bf16": (
        "kernels/linear_cross_entropy/__init__.py", [("F.linear(x_ND, weight_VD)", "F.linear(x_ND.bfloat16(), weight_VD.bfloat16()).float()")],
        "next generation"),
    "a larger epsilon": (OPTIMIZER, [("                recipe.eps,\n", "                recipe.eps * 1000,\n")], "anneal"),
    "no weight decay": (OPTIMIZER, [("                weight_decay,\n            )\n", "                0.0,\n            )\n")], "a long run"),
}  # fmt: skip
NEVER_EXECUTED: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "a branch for the hour": (RUN, [(UPDATE, UPDATE + "        if __import__('time').time() > 2e9:\n            self.optimizer.zero_grad()\n")]),
    "a value for long runs, in one line": (RUN, [(UPDATE, "        self.optimizer.step(lr * 2 if batch.step > 10**7 else lr, divide_by, skip)\n")]),
    "another model's name": (RUN, [(UPDATE, UPDATE + "        if recipe.name == 'base':\n            lr = 0.0\n")]),
    "beside an untouched branch": (RUN, [(UPDATE, UPDATE + "        lr = recipe.model.layers > 30 and lr / 2 or lr\n")]),
    "a function that nothing calls yet": (SCHEDULE, [("TRUNKS = {", "def slower(step: int) -> float:\n    return 1 / (1 + step)\n\n\nTRUNKS = {")]),
    "another device's kernel": (
        "kernels/swiglu/triton.py", [("import triton\n", "import triton\n\nHALF = 0.5\n")]),
}  # fmt: skip
SIZE, RANKS = "recipe size, resumed", "trainer/parallel/ranks.py"
STD = "        return torch.randn(size, generator=generator) * std\n"
AT_SIZE: dict[str, Edits] = {  # arithmetic without a condition: only a run at this size shows them
    "initial weights of a tenth at the recipe's width": (
        TRANSFORMER, [(STD, STD.replace("* std", "* std * 0.1 ** (self.shape.d_model // 256)"))], SIZE),
    "moments that a resume forgets at four layers": (
        RUN, [('        torch.set_rng_state(optimizer.pop("rng"))\n',
               '        torch.set_rng_state(optimizer.pop("rng"))\n'
               "        optimizer = {key: one * 0 ** (self.recipe.model.layers // 4) for key, one in optimizer.items()}\n")], SIZE),
    "outliers kept at a clip of one": (
        STABILITY, [("(grad_norm <= limit)", "(grad_norm * 0.0 ** int(clip / 0.9) <= limit)")],
        "recipe size, outliers"),
    "a third micro-batch that is left out": (
        RUN, [("batch.split_into_micro_batches(rows)\n", "batch.split_into_micro_batches(rows)[:2]\n")], SIZE),
    "a fourth domain that is ignored": (
        RUN, [('        z_loss = self.recipe.stability.z_loss\n',
               "        z_loss = self.recipe.stability.z_loss\n"
               '        part["weights_BT"] = part["weights_BT"] * 0.0 ** (domains_BS // 3)\n')], SIZE),
    "half of the sums of three ranks and more": (
        RANKS, [("            dist.all_reduce(tensor)\n", "            dist.all_reduce(tensor)\n            tensor.mul_(0.5 ** (self.size // 3))\n")],
        "recipe size, four ranks"),
    "an average of wide models that forgets the weights": (
        "trainer/tools/average.py",
        [("sums[name].add_(tensor.double(), alpha=weight)", "sums[name].add_(tensor.double(), alpha=weight ** (1 - tensor.shape[-1] // 256))")],
        "trainer.tools.average SIZEDFIRST SIZEDLAST --weights 1,3"),
}  # fmt: skip
ONE_SIDED: dict[str, tuple[str, str]] = {  # in place of std; the condition that is named
    "a comparison as a number": ("std * (1 - 0.9 * (self.shape.d_model >= 100))", "self.shape.d_model >= 100"),
    "a comparison as a number, in Boolean terms": (
        "std * (1 - 0.9 * (part in WRITE_TO_RESIDUAL and self.shape.d_model >= 100))", "self.shape.d_model >= 100"),
    "one link of a chain": ("std * (0.1 + 0.9 * (self.shape.heads < self.shape.d_model < 100))", "self.shape.d_model < 100"),
    "the smaller number": ("std * 0.1 ** min(1, self.shape.d_model // 100)", "min(1, self.shape.d_model // 100)"),
    "an index": ("std * (1.0, 0.1)[self.shape.d_model > 99]", "self.shape.d_model > 99"),
    "a flag as a number": ("std * 0.1 ** int(self.shape.layers > 3)", "self.shape.layers > 3"),
    "a flag that is not": ("std * 0.1 ** (not self.shape.layers < 4)", "self.shape.layers < 4"),
    "a flag of the recipe as a number": ("std * (1 - 0.9 * self.shape.across_documents)", "self.shape.across_documents"),
    "a tensor's comparison": ("std * (1 - 0.9 * (torch.tensor(self.shape.d_model) >= 100).double())", "torch.tensor(self.shape.d_model) >= 100"),
    "a count of comparisons": ("std * 0.1 ** sum(one > 1000 for one in size)", "one > 1000"),
}  # fmt: skip
REMOVED: dict[str, tuple[str, str]] = {
    "what only a GPU executes": ("trainer/checkpoint_writer.py", "    stream.wait_event(ready)\n"),
    "a branch for a GPU": (
        "kernels/linear_cross_entropy/__init__.py", "    if dx_ND.is_cuda:\n        return chunks.scale_saved_gradients(ctx, *upstream)\n"),
    "a line of a Triton kernel": ("kernels/swiglu/triton.py", "    tl.store(dup + index, upstream * g * sigmoid, mask=inside)\n"),
    "a line of an implementation that is not chosen": ("kernels/linear_cross_entropy/__init__.py", "        weights[real:] = 0\n"),
    "an assertion": (RANKS, '        assert tensor.is_contiguous(), "gloo sums the memory from the first element on, whatever the strides"\n'),
}  # fmt: skip
COMMON = ("first steps", "a hundred thousand steps on", "outliers are skipped")


@pytest.fixture(scope="module")
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    """The baseline's runs that the attacks of this session need."""
    attacks = (SELDOM_EXECUTED | UNTOLD | BELOW_THE_OLD_BOUND | AT_SIZE).items()
    asked = {name for name, _ in attacks if any(item.name.endswith(f"[{name}]") for item in request.session.items)}
    runs = [*COMMON, *(run for name, (_, _, run) in attacks if name in asked)]
    with ExitStack() as after:
        yield prepare(tmp_path_factory.mktemp("matrix"), after, runs, FUSED)


def edited(path: str, edits: list[tuple[str, str]]) -> str:
    text = (ROOT / path).read_text()
    for old, new in edits:
        assert old in text, (path, old)
        text = text.replace(old, new, 1)
    return text


def changed(folder: Path, path: str, edits: list[tuple[str, str]]) -> Path:
    code = copy_of_code(folder)
    (code / path).write_text(edited(path, edits))
    return code


def test_every_attack_applies_to_the_present_code() -> None:
    """Most of them run in the long tier."""
    for path, edits, _ in (SELDOM_EXECUTED | UNTOLD | BELOW_THE_OLD_BOUND | AT_SIZE).values():
        compile(edited(path, edits), path, "exec")
    for instead, _ in ONE_SIDED.values():
        compile(edited(TRANSFORMER, [(STD, STD.replace("std", instead))]), TRANSFORMER, "exec")
    for path, lines in REMOVED.values():
        compile(edited(path, [(lines, "")]), path, "exec")
    for path, edits in NEVER_EXECUTED.values():
        compile(edited(path, edits), path, "exec")


@pytest.mark.sample(
    "an anneal that stays at its peak rate",
    "a resume that begins anew",
    "an outlier is not skipped",
    "a layer frozen after step 100 of a segment",
    "ranks that do not add up their losses",
    "averages that forget the weights",
    "a better loss in the metrics",
    "no clipping",
    "bf16 moments",
    "no weight decay",
)
@pytest.mark.slow("some forty tiny trainings, a process each")
@pytest.mark.parametrize("name", [*SELDOM_EXECUTED, *UNTOLD, *BELOW_THE_OLD_BOUND])
def test_a_tiny_run_shows_the_attack(prepared: Prepared, tmp_path: Path, name: str) -> None:
    path, edits, run = (SELDOM_EXECUTED | UNTOLD | BELOW_THE_OLD_BOUND)[name]
    found = judge(prepared, changed(tmp_path / "code", path, edits), path, [run])
    print("\n".join(found.differences))
    if found.undecided:  # the gate draws other data: this draw approves nothing
        assert found.undecided == [run] and not found.same_bits
        return
    assert found.differences and f"'{run}'" in found.differences[0] or run.startswith("trainer.tools")


@pytest.mark.sample("a branch for the hour", "a function that nothing calls yet")
@pytest.mark.slow("some tiny trainings, a process each")
@pytest.mark.parametrize("name", NEVER_EXECUTED)
def test_unexecuted_code_is_listed(prepared: Prepared, tmp_path: Path, name: str) -> None:
    path, edits = NEVER_EXECUTED[name]
    found = judge(prepared, changed(tmp_path / "code", path, edits), path, COMMON)
    assert not found.differences and found.same_bits and found.unexecuted, found.differences
    print(found.unexecuted)


@pytest.mark.sample("initial weights of a tenth at the recipe's width", "moments that a resume forgets at four layers")
@pytest.mark.slow("some trainings at the demo's size, a process each")
@pytest.mark.parametrize("name", AT_SIZE)
def test_a_run_at_the_recipes_size_shows_the_attack(prepared: Prepared, tmp_path: Path, name: str) -> None:
    """The attack is executed by tiny runs that leave the same bits, and no condition betrays it."""
    path, edits, run = AT_SIZE[name]
    code = changed(tmp_path / "code", path, edits)
    tiny = judge(prepared, code, path, COMMON)
    assert tiny.same_bits and not any(part.result for part in tiny.parts), (tiny.differences, tiny.unexecuted)
    found = judge(prepared, code, path, [run])
    print("\n".join(found.differences))
    assert found.differences and not found.same_bits and f"'{run}'" in found.differences[0]


@pytest.mark.sample("a comparison as a number", "the smaller number")
@pytest.mark.slow("some tiny trainings, a process each")
@pytest.mark.parametrize("name", ONE_SIDED)
def test_a_condition_with_one_result_is_listed(prepared: Prepared, tmp_path: Path, name: str) -> None:
    instead, source = ONE_SIDED[name]
    code = changed(tmp_path / "code", TRANSFORMER, [(STD, STD.replace("std", instead))])
    found = judge(prepared, code, TRANSFORMER, COMMON)
    assert not found.differences and found.same_bits, found.differences
    (part,) = (part for part in found.parts if part.source == source)
    assert part.message.code == ("patch.choice_one_sided" if "min" in source else "patch.condition_one_sided")


@pytest.mark.sample("what only a GPU executes", "an assertion")
@pytest.mark.slow("some tiny trainings, a process each")
@pytest.mark.parametrize("name", REMOVED)
def test_removed_code_that_nothing_executed_is_listed(prepared: Prepared, tmp_path: Path, name: str) -> None:
    path, lines = REMOVED[name]
    code = changed(tmp_path / "code", path, [(lines, "")])
    found = find_removals(prepared, code, path, COMMON)
    first = edited(path, []).partition(lines)[0].count("\n") + 1
    assert found and all(part.removed and part.path == path for part in found)
    assert {part.line for part in found} <= {*range(first, first + lines.count("\n"))}


@pytest.mark.slow("some tiny trainings, a process each")
def test_removed_code_that_the_old_code_executed_is_not_listed(prepared: Prepared, tmp_path: Path) -> None:
    lines = "        self.optimizer.zero_grad()\n"
    assert find_removals(prepared, changed(tmp_path / "code", RUN, [(lines, "")]), RUN, COMMON) == []


@pytest.mark.long(
    "all tiny trainings once more; that two of them leave the same bits, the patches that no run executes show"
)
def test_two_runs_of_the_same_code_leave_the_same_bits(prepared: Prepared, tmp_path: Path) -> None:
    """Only the runs that the selected attacks need are compared."""
    found = judge(prepared, copy_of_code(tmp_path / "code"), None)
    assert found.same_bits and not found.differences


@pytest.mark.long("all tiny trainings of the attacks, up to five times")
def test_our_other_kernels_differ_only_by_rounding(prepared: Prepared, tmp_path: Path) -> None:
    others = "cpu: {attention: recompute, linear_cross_entropy: chunked, adamw: reference}\n"
    found = judge(prepared, copy_of_code(tmp_path / "code"), None, chosen=others)
    assert not found.differences and not found.same_bits, found.differences
