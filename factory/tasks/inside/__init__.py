"""Programs that run in the sandbox for a task. They import nothing of the factory, and nothing imports them."""
