"""The audit: it replays windows of real segments without the patches that agents wrote, and compares the replay with live training.

``audit_windows`` draws a window before a segment trains and lists the waiting audits. ``kept_checkpoints`` copies the window's two checkpoints while
the segment
trains. ``audit_segment`` replays the steps in the sandbox and reads what both left. ``judge`` decides as a pure function of the evidence.
``factory.code_loop.reverting`` proposes to revert a patch that made a difference. So a patch that misbehaves only after the gate is found.
"""
