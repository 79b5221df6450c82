"""Failures: the factory tells faults apart, waits, tries again, parks segments without progress, and asks a person.

a duty fails    ─► backoff (waits twice as long each time; ``factory.duties.back_off`` reports the failure once, other duties continue)
a trainer dies  ─► tries (after a crash, the OOM killer or a hang: starts again from its checkpoint, or parks the segment)
a tool hangs    ─► watchdog (kills it)
a person        ─► asking (pause, resume, a duty now), tries (retry, abandon); work on a rewound segment is given up
"""
