"""What the factory does about what fails: it tells faults apart, waits, tries again, parks what makes no progress, and asks a person.

a duty fails    ─► backoff (waits longer each time; ``factory.duties.back_off``: says so once, and the rest goes on)
a trainer dies  ─► tries (crash, OOM killer, hang: watchdog; again from its checkpoint, or parked)
a tool hangs    ─► watchdog (does nothing any more: killed)
a person        ─► asking (pause, resume, a duty now), tries (retry, abandon); what is at work on what was rewound is given up
"""
