"""Proposals: agents make them, a gate judges them, people approve or revert them, and the gate judges merged ones again later.

``proposing`` → ``submitting`` → ``factory.gates`` → ``approvals``; ``revalidating`` proposes to undo patches that no longer gain.
"""
