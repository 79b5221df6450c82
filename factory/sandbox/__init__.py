"""Processes whose code nobody vouches for: bubblewrap or namespaces, control groups, seccomp, clocks, limits."""
