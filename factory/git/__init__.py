"""The git repository of the training code: live commit, worktrees, branches of proposals, the scope of patches, and the factory's version."""
