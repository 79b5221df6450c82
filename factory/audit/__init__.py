"""The audit: it replays windows of real segments without the patches that agents wrote, and compares the replay with live training.

``drawing`` draws a window before a segment trains and lists the waiting audits. ``keeping`` copies the window's two checkpoints while the segment
trains. ``auditing`` replays the steps in the sandbox and reads what both left. ``judge`` decides as a pure function of the evidence.
``factory.code_loop.reverting`` proposes to revert a patch that made a difference. So a patch that misbehaves only after the gate is found.
"""
