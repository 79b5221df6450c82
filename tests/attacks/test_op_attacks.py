"""Hostile implementations of an op, each a real one that runs: the op oracle or the exploit checks must stop it.

All of them are implementations of ``swiglu`` in one candidate, asked in one sandboxed process, as a patch with several ops
would be. Where the static stage also refuses the source, that is said too, so that nothing hangs on reading alone.
"""

from __future__ import annotations

from kernels.contract.message import Message

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.factory.code_loop import make_target

from factory.gates.patch import op_answers, source_rules
from factory.gates.patch.changed_ops import ChangedOp
from factory.gates.patch.policy import PatchPolicy
from factory.gates.patch.stages import exploits, oracle
from factory.git.scope import FileChange
from factory.core.workspace import find_checkout_root
from trainer.contract.recipe import Recipe

SHIPPED = PatchPolicy.load(find_checkout_root() / "policies" / "gates" / "patch.yaml")
RECIPE = Recipe.load(find_checkout_root() / "policies" / "recipes" / "tiny.yaml").model_dump()
HEAD = "from __future__ import annotations\n\nimport torch\nimport torch.nn.functional as F\n"
# Right, and at its own speed: what an attack that skips the forward pass uses for the gradients.
RIGHT = "\n\ndef right(gate, up):\n    return F.silu(gate) * up\n\n\n"
ORACLE, EXPLOITS = "oracle", "exploits"


@dataclass(frozen=True)
class Attack:
    stage: str  # the first that must fail; "" where the results are right, and the whole step's time decides
    words: str
    source: str  # defines fast(gate, up)
    read: str = ""  # what the static stage says; "": nothing, only running it tells
    triton: bool = False


# A value for the forward pass with the gradients of the right one: wrong in its outputs alone.
KEPT = (
    "def with_gradients(value, gate, up):\n    true = right(gate, up)\n    return value + (true - true.detach())\n\n\n"
)
CACHE = (
    "KNOWN = {{}}\n\n\ndef fast(gate, up):\n    key = {key}\n    if key not in KNOWN:\n        KNOWN[key] = right(gate, up).detach()\n"
    "    return with_gradients(KNOWN[key], gate, up)\n"
)
PHASE = "CALLS = []\n\n\ndef fast(gate, up):\n    CALLS.append(1)\n    return right(gate, up) if {when} else with_gradients((gate + up).detach() * 0.5, gate, up)\n"
FUNCTION = (
    "class Swiglu(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, gate, up):\n"
    "        ctx.save_for_backward(gate, up)\n        return made(gate, up)\n\n    @staticmethod\n    def backward(ctx, upstream):\n"
    "        gate, up = ctx.saved_tensors\n        share = torch.sigmoid(gate)\n"
    "        return upstream * up * share * (1 + gate * (1 - share)), upstream * F.silu(gate)\n\n\ndef fast(gate, up):\n"
    "    return Swiglu.apply(gate, up)\n"
)
ATTACKS = {
    "zeros": Attack(ORACLE, "relative error", "def fast(gate, up):\n    return (gate + up) * 0\n"),
    "a constant": Attack(ORACLE, "relative error", "def fast(gate, up):\n    return (gate + up) * 0 + 0.1\n"),
    "the identity": Attack(ORACLE, "relative error", "def fast(gate, up):\n    return up + gate * 0\n"),
    "a wrong backward": Attack(
        ORACLE, "gradient", "def fast(gate, up):\n    return right(gate, up).detach() + (gate + up) * 0\n"
    ),
    "no gradient at all": Attack(
        ORACLE, "raised", "def fast(gate, up):\n    return right(gate.detach(), up.detach())\n"
    ),
    "fp16 inside fp32": Attack(
        ORACLE,
        "relative error",
        "def fast(gate, up):\n    low = torch.float16\n    return right(gate.to(low), up.to(low)).to(gate.dtype)\n",
    ),
    "bf16 inside fp32": Attack(
        ORACLE,
        "relative error",
        "def fast(gate, up):\n    low = torch.bfloat16\n    return right(gate.to(low), up.to(low)).to(gate.dtype)\n",
    ),
    "ten bits of mantissa, as TF32": Attack(
        ORACLE,
        "relative error",
        "def fast(gate, up):\n    cut = (gate.detach().view(torch.int32) & -8192).view(torch.float32)\n"
        "    return right(gate + (cut - gate).detach(), up)\n",
    ),
    "another dtype": Attack(ORACLE, "dtype", "def fast(gate, up):\n    return right(gate, up).double()\n"),
    "another shape": Attack(ORACLE, "shape", "def fast(gate, up):\n    return right(gate, up)[:1]\n"),
    "NaN as a wildcard": Attack(
        ORACLE, "not finite", "def fast(gate, up):\n    return right(gate, up) * float('nan')\n"
    ),
    "always equal": Attack(
        ORACLE,
        "not a plain tensor",
        "class Equal:\n    shape, dtype, requires_grad = (), torch.float32, True\n\n    def __eq__(self, other):\n        return True\n\n"
        "    def __getattr__(self, name):\n        return lambda *a, **k: self\n\n\ndef fast(gate, up):\n    return Equal()\n",
    ),
    "a lazy tensor": Attack(
        ORACLE,
        "not a plain tensor",
        "class Lazy(torch.Tensor):\n    @classmethod\n    def __torch_function__(cls, function, types, args=(), kwargs=None):\n"
        "        with torch._C.DisableTorchFunctionSubclass():\n"
        "            done = [right(*a.parts) if isinstance(a, Lazy) else a for a in args]\n"
        "            return function(*done, **(kwargs or {}))\n\n\n"
        "def fast(gate, up):\n    out = torch.empty_like(gate).as_subclass(Lazy)\n    out.parts = gate, up\n    return out\n",
        read="its own tensor class",
    ),
    "a changed input": Attack(
        ORACLE,
        "changes its inputs",
        "def fast(gate, up):\n    out = right(gate.clone(), up.clone())\n    up.detach().mul_(2).add_(1e-9)\n    return out\n",
    ),
    "reading the right answers": Attack(
        ORACLE,
        "SAW []",
        "def fast(gate, up):\n    import pathlib\n    import sys\n    given = pathlib.Path(sys.argv[-2])\n"
        "    raise RuntimeError('SAW ' + str([p.name for p in given.parent.rglob('exact-*')]))\n",
        read="imports pathlib",
    ),
    "the truth in a frame": Attack(
        ORACLE,
        "FOUND []",
        "import sys\n\n\ndef fast(gate, up):\n    frame, seen = sys._getframe(0), []\n    while frame is not None:\n"
        "        seen += [n for n in frame.f_locals if n in ('exact', 'eager', 'truth', 'expected')]\n        frame = frame.f_back\n"
        "    raise RuntimeError('FOUND ' + str(seen))\n",
        read="_getframe",
    ),
    "the truth in the collector": Attack(
        ORACLE,
        "relative error",
        KEPT
        + "import gc\n\n\ndef fast(gate, up):\n    known = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.shape == gate.shape]\n"
        "    known = [x for x in known if x is not gate and x is not up and x.dtype == gate.dtype]\n"
        "    return with_gradients(known[0].detach() if known else torch.zeros_like(gate), gate, up)\n",
        read="imports gc",
    ),
    "work left to a thread": Attack(
        ORACLE,
        "relative error",
        "import threading\nimport time\n\n\ndef made(gate, up):\n    out = torch.zeros_like(gate)\n\n    def later():\n        time.sleep(1)\n"
        "        out.copy_(right(gate.detach(), up.detach()))\n\n    threading.Thread(target=later).start()\n    return out\n\n\n"
        + FUNCTION,
        read="imports threading",
    ),
    "a kernel never launched": Attack(
        ORACLE, "launches no Triton kernel", "def fast(gate, up):\n    return right(gate, up)\n", triton=True
    ),
    "a fallback inside try": Attack(
        "",
        "",
        "def fast(gate, up):\n    try:\n        return torch.ops.factory.no_such_kernel(gate, up)\n    except (AttributeError, RuntimeError):\n"
        "        return right(gate, up)\n",
        read="catches every exception",
    ),
    "a cache by shape": Attack(ORACLE, "relative error", KEPT + CACHE.format(key="gate.shape, gate.dtype")),
    "a cache by object": Attack(
        EXPLOITS, "relative error", KEPT + CACHE.format(key="id(gate), gate.shape"), read="uses id"
    ),
    "a cache by pointer": Attack(
        EXPLOITS, "relative error", KEPT + CACHE.format(key="gate.data_ptr(), gate.shape"), read="data_ptr"
    ),
    "a cache by version": Attack(
        EXPLOITS,
        "relative error",
        KEPT + CACHE.format(key="id(gate), gate._version, gate.shape"),
        read="uses ._version",
    ),  # fmt: skip
    "a cache by content": Attack(
        EXPLOITS,
        "relative error",
        KEPT + CACHE.format(key="gate.shape, *gate.flatten()[:8].tolist(), *up.flatten()[:8].tolist()"),
    ),
    "a cache by functools": Attack(
        EXPLOITS,
        "relative error",
        "import functools\n\n\n@functools.lru_cache\ndef known(gate, up):\n    return right(gate, up).detach()\n\n\n"
        + KEPT
        + "def fast(gate, up):\n    return with_gradients(known(gate, up), gate, up)\n",
    ),  # fmt: skip
    "one call of two": Attack(
        EXPLOITS,
        "relative error",
        KEPT + "LAST = {}\n\n\ndef fast(gate, up):\n    old = LAST.pop(gate.shape, None)\n    if old is None:\n"
        "        LAST[gate.shape] = old = right(gate, up).detach()\n    return with_gradients(old, gate, up)\n",
    ),  # fmt: skip
    "right while it is new": Attack(EXPLOITS, "relative error", KEPT + PHASE.format(when="len(CALLS) < 30")),
    "right for the tests' sizes": Attack(
        EXPLOITS, "relative error", KEPT + PHASE.format(when="gate.shape[-1] in (128, 768, 97, 1)")
    ),
    "wrong for the recipe's sizes": Attack(
        EXPLOITS, "relative error", KEPT + PHASE.format(when=f"gate.shape[-1] != {RECIPE['model']['d_ff']}")
    ),
    "memory used again": Attack(
        EXPLOITS,
        "changed after the op had returned",
        "HELD = {}\n\n\ndef made(gate, up):\n    held = HELD.setdefault(gate.shape, torch.empty_like(gate))\n"
        "    return torch.mul(F.silu(gate), up, out=held.detach())\n\n\n" + FUNCTION,
    ),  # fmt: skip
}
HONEST = {
    "written out": "def fast(gate, up):\n    return gate * torch.sigmoid(gate) * up\n",
    "a backward of its own": "def made(gate, up):\n    return F.silu(gate) * up\n\n\n" + FUNCTION,
    "in place, in memory of its own": "def made(gate, up):\n    out = F.silu(gate)\n    return out.mul_(up)\n\n\n"
    + FUNCTION,
    "row by row": "def fast(gate, up):\n    return torch.cat([right(g, u) for g, u in zip(gate.split(1), up.split(1))])\n",
    "in double precision": "def fast(gate, up):\n    return right(gate.double(), up.double()).to(gate.dtype)\n",
    "another order": "def fast(gate, up):\n    return (up * gate) / (1 + torch.exp(-gate.clamp(min=-80)))\n",
    "scratch memory kept between calls": "SCRATCH = {}\n\n\ndef made(gate, up):\n    kept = SCRATCH.setdefault(gate.shape, torch.empty_like(gate))\n"
    "    torch.sigmoid(gate, out=kept)\n    return kept * gate * up\n\n\n" + FUNCTION,
}
OPS = """from kernels import {modules}
from kernels.contract.op import Implementation

HOSTILE = ({implementations})
"""


@dataclass(frozen=True)
class Judged:
    oracle: dict[str, Any]
    exploits: dict[str, Any]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Judged]:
    """Every implementation through both stages, in one pair of sandboxed processes."""
    root = tmp_path_factory.mktemp("ops")
    baseline = make_target(root / "baseline")
    candidate = shutil.copytree(baseline, root / "candidate", ignore=shutil.ignore_patterns(".git"))
    sources = {name: attack.source for name, attack in ATTACKS.items()} | HONEST
    modules = {name: f"attack_{number}" for number, name in enumerate(sources)}
    for name, module in modules.items():
        (candidate / "kernels" / f"{module}.py").write_text(_file(sources[name]))
    implementations = "".join(
        f"Implementation({module!r}, {module}.fast, '', needs_triton={name in ATTACKS and ATTACKS[name].triton}), "
        for name, module in modules.items()
    )
    text = OPS.format(modules=", ".join(modules.values()), implementations=implementations)
    (candidate / "kernels" / "attacks.py").write_text(text)
    op = candidate / "kernels" / "swiglu" / "__init__.py"
    changed = op.read_text().replace("TRITON, NATIVE)", "TRITON, NATIVE, *HOSTILE)")
    op.write_text(changed.replace("import torch\n", "import torch\nfrom kernels.attacks import HOSTILE\n", 1))
    ops = {name: ChangedOp("swiglu", "reference", module) for name, module in modules.items()}
    few = SHIPPED.exploits.model_copy(update={"calls": 12})
    jobs: list[dict[str, Any]] = []
    ranges: dict[str, list[range]] = {name: [] for name in ops}
    for name, changed_op in ops.items():
        more = oracle.make_oracle_jobs(SHIPPED.oracle, [changed_op], "fp32")
        ranges[name].append(range(len(jobs), len(jobs) + len(more)))
        jobs += more
    for name, changed_op in ops.items():
        more = []
        if name in HONEST or ATTACKS[name].stage != ORACLE:
            policy = SHIPPED.exploits if "while it is new" in name else few
            more = exploits.make_exploit_calls(policy, [changed_op], RECIPE, random.SystemRandom())
        ranges[name].append(range(len(jobs), len(jobs) + len(more)))
        jobs += more
    with op_answers.run_op_jobs(jobs, SHIPPED.oracle, baseline, candidate, root / "work") as answers:
        assert not answers.missing and not answers.died, answers
        return {
            name: Judged(
                *(answers.make_evidence(numbers, Message("attacks.right", "right"), last=False) for numbers in both)
            )
            for name, both in ranges.items()
        }


def _file(source: str) -> str:
    return HEAD + RIGHT + source


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_op_is_stopped(judged: dict[str, Judged], name: str) -> None:
    attack, found = ATTACKS[name], judged[name]
    if attack.stage:
        stage = found.oracle if attack.stage == ORACLE else found.exploits
        assert stage["state"] == "failed" and attack.words in "; ".join(stage["reasons"]), stage
    else:
        assert found.oracle["state"] == found.exploits["state"] == "passed", found
    said = "; ".join(
        source_rules.find_source_problems(FileChange("kernels/attack.py", _file(attack.source).encode()), None)
    )
    assert attack.read in said and bool(attack.read) == bool(said), said


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_op_passes(judged: dict[str, Judged], name: str) -> None:
    assert judged[name].oracle["state"] == judged[name].exploits["state"] == "passed", judged[name]
    assert source_rules.find_source_problems(FileChange("kernels/fast.py", _file(HONEST[name]).encode()), None) == []
