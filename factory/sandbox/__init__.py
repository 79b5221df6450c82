"""Runs untrusted code: bubblewrap, control groups, seccomp, clocks, limits. ``sandbox.run`` is the entrance."""
