"""What the factory does about what fails: it tells faults apart, waits, tries again, parks what makes no progress, and asks a person.

an action fails ─► faults (is it the machine?) ─► steady (waits longer each time, says so once; the rest goes on)
a trainer dies  ─► endings (crash, OOM killer, hang: watchdog) ─► tries (again from its checkpoint, or parked)
a tool hangs    ─► quiet (does nothing any more: killed)
a person        ─► pausing (pause, resume), tries (retry, abandon)
"""
