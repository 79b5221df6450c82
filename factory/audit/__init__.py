"""The audit replays some steps of real segments without the patches that agents wrote, and compares the replay with live training.

An audit finds a patch that misbehaves only after the patch gate has passed it.

``audit_windows`` draws a window of steps before a segment trains, and lists the waiting audits. ``kept_checkpoints`` copies the window's two
checkpoints while the segment trains. ``audit_segment`` replays the steps in the sandbox and compares the files of both runs (``live_records``).
``audit_average`` does the same for an average of checkpoints. ``judge`` decides as a pure function of the evidence.
``factory.code_loop.reverting`` proposes to revert a patch that made a difference.
"""
