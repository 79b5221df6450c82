"""Proposals: drawn up by agents, submitted to a gate, approved or reverted by people, judged again later.

``proposing`` → ``submitting`` → ``factory.gates`` → ``approvals``; ``revalidating`` undoes what no longer gains.
"""
