"""The repository: the live commit, worktrees, branches of proposals, and the scope that a patch must stay in."""
