"""The repository: the live commit, worktrees, branches of proposals, the scope that a patch must stay in, and the version of this factory."""
