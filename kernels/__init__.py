"""The ops of a training step, a folder each: a plain reference, its cost model, its test inputs (``__init__.py``), and
its fast implementations (``triton.py``; ``cpp.py`` with its C++).

Agents may patch every folder but ``contract/``. Only torch is required (and triton for the implementations of that name).
To add an op: its folder with an ``OP`` in ``__init__.py`` (see ``rms_norm/``), its name and signature in ``contract/registry.py``,
``Ops``, and a line under each device in ``policies/kernels.yaml``.
"""
