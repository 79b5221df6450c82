"""Runs untrusted code: bubblewrap or namespaces, control groups, seccomp, clocks, limits. ``sandbox.run`` is the entrance."""
