"""Proposals: made by agents, judged by a gate, approved or reverted by people, judged again later.

``proposing`` → ``submitting`` → ``factory.gates`` → ``approvals``; ``revalidating`` proposes to undo what no longer gains.
"""
