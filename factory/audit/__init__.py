"""The audit: windows of real segments are replayed afterwards without the patches that agents wrote, and the two are compared.

``drawing`` draws a window before a segment trains, ``keeping`` copies its two checkpoints aside while it does, ``replaying`` runs the same
steps in the sandbox, ``comparing`` reads what both left, ``judge`` is the pure function of the evidence, ``auditing`` puts them together.
``waiting`` says what is still to be done. ``factory.code_loop.reverting`` opens a revert of a patch that made a difference. That catches a patch
that waits until nobody judges it.
"""
