"""Runs untrusted code: bubblewrap, control groups, seccomp, clocks, limits. Start with ``sandbox.run_in_sandbox``."""
