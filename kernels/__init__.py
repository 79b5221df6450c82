"""The ops of a training step. Each op has a folder: ``__init__.py`` has its plain reference, cost model and test inputs, and the other files have
its fast implementations (``triton.py``, and ``cpp.py`` with its C++).

Agents may patch every folder except ``contract/``. Only torch is required, and triton for the implementations of that name.
To add an op, write its folder with an ``OP`` in ``__init__.py`` (see ``rms_norm/``), add its name and signature to ``Ops`` in
``contract/registry.py``, and add a line under each device in ``policies/kernels.yaml``.
"""
