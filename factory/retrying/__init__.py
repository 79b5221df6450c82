"""Failures: the factory tells faults apart, waits, tries again, parks segments without progress, and asks a person.

a duty fails    ─► ``failure_waits`` (each wait is twice as long; ``factory.duties.back_off`` reports the failure once, other duties continue)
a trainer dies  ─► ``trainer_deaths`` (after a crash, the OOM killer or a hang: the segment continues from its checkpoint, or is parked)
a tool hangs    ─► ``watchdog`` (kills the tool)
a person        ─► ``daemon_requests`` (pause, resume, a duty now), ``trainer_deaths`` (retry, abandon); work on a rewound segment is given up
"""
