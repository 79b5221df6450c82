"""``factory demo``: runs the whole factory once on this machine, in the given minutes."""
