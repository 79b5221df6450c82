"""Programs that run in the sandbox for a task, each by itself: they import nothing of the factory, and nothing imports them."""
