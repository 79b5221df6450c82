"""The names that ``source_rules`` looks for in a patch's source.

A separate file, because its texts are lists of names, not messages.
"""

from __future__ import annotations

import sys


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Packages that a changed file may import.
ALLOWED_IMPORTS = _words("""
    abc bisect collections contextlib copy dataclasses enum functools __future__ heapq itertools json kernels logging math
    numbers numpy operator re statistics string textwrap torch trainer triton types typing warnings
""")
STANDARD_MODULES = ALLOWED_IMPORTS & sys.stdlib_module_names
# Modules that a file must not import from another module: "from trainer.segment import os". A name may begin with "_".
FORBIDDEN_MODULES = _words("""
    bltns builtins ctypes gc importlib inspect io os Path pathlib pickle posix shutil signal socket subprocess sys
    tempfile thread threading
""")
# Names that read or write files, or evade these rules: attributes named by a text, suppressed errors, evaluated text.
FORBIDDEN_PARTS = _words("""
    contextlib.suppress dataclasses.make_dataclass logging.config logging.FileHandler logging.handlers numpy.ctypeslib
    numpy.fromfile numpy.load numpy.memmap numpy.random.seed numpy.save operator.attrgetter operator.methodcaller
    types.CodeType types.FunctionType types.new_class typing.ForwardRef typing.get_type_hints
""")
# Parts of torch that load code, start processes, read clocks or change settings of the process.
FORBIDDEN_TORCH_PARTS = _words("""
    _C classes cuda.Event cuda.stream cuda.Stream default_generator distributed.rpc from_file hub jit library.define
    library.impl library.Library library.register_kernel load manual_seed multiprocessing ops.load_library overrides
    package profiler random save seed serialization set_default_device set_default_dtype
    set_float32_matmul_precision set_flush_denormal set_num_interop_threads set_num_threads set_rng_state
    use_deterministic_algorithms utils._python_dispatch utils.benchmark utils.cpp_extension utils.model_zoo
""")
ALLOWED_SUBMODULES = _words("""
    numpy.random torch.autograd torch.backends torch.compiler torch.cuda torch.distributed torch.library torch.nn
    torch.nn.functional torch.nn.init torch.ops torch.optim torch.utils torch.utils.checkpoint triton.language
    triton.runtime
""")
# Built-in functions and variables.
NAMES = _words("""
    breakpoint __builtins__ compile delattr eval exec getattr globals id __import__ __loader__ locals open setattr
    __spec__ vars
""")
REDEFINABLE_BUILTINS = _words("compile id vars")  # built-in functions whose names a file may give to values of its own
FACTS = _words("__doc__ __name__")
ATTRIBUTE_FUNCTIONS = _words("delattr getattr hasattr setattr")  # harmless if the attribute's name is a literal
# Attributes that reach frames, clocks, memory, processes, or the hooks by which torch and Python call a class.
FORBIDDEN_ATTRIBUTES = _words("""
    ag_frame __bases__ __builtins__ __class__ __closure__ __code__ cr_frame data_ptr __dict__ environ _exit f_back
    f_globals f_locals fork from_file __getattribute__ _getframe gi_frame __globals__ is_compiling kill monotonic __mro__
    perf_counter popen process_time __reduce__ __reduce_ex__ __setattr__ __subclasses__ system tb_frame
    __torch_dispatch__ __torch_function__ untyped_storage _version
""")
BROAD_EXCEPTIONS = {"Exception", "BaseException", "RuntimeError"}  # torch and triton raise these when a kernel fails
