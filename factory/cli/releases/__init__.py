"""``factory releases`` and what else is done with a release: look at it, compare it, approve, reject, roll back."""
