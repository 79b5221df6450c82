"""The release gate. ``gate`` gathers evidence and records verdicts. ``judge`` decides, as a pure function. ``policy`` has the thresholds."""
