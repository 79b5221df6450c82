"""Runs untrusted code with bubblewrap, control groups, seccomp, clocks and limits. To read the code, start with ``sandbox.run_in_sandbox``."""
