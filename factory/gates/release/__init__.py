"""The release gate. ``judge`` is a pure function of the evidence, ``policy`` has its thresholds, ``gate`` gathers evidence and records verdicts."""
