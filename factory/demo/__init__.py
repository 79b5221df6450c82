"""``factory demo``: the whole factory once on this machine, sized to some minutes."""
