"""``factory demo``: the whole story on this machine, sized to some minutes."""
