"""The code loop: agents propose patches of the training code, a gate judges each proposal, and people approve, reject or revert it.

A proposal passes through ``proposing`` → ``submitting`` → ``factory.gates`` → ``approvals``. After a merge, ``revalidating`` has the patch judged
again when its surroundings change, and proposes to undo a patch that no longer gains.
"""
