"""The audit: windows of real segments are replayed afterwards without the patches that agents wrote, and the two are compared.

``drawing`` draws a window before a segment trains and says which still wait, ``keeping`` copies its two checkpoints aside while it does,
``auditing`` runs the same steps in the sandbox and reads what both left, ``judge`` is the pure function of the evidence.
``factory.code_loop.reverting`` opens a revert of a patch that made a difference. That catches a patch that waits until nobody judges it.
"""
