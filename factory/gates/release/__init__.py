"""The release gate: ``judge`` is a pure function of the evaluations, ``policy`` its thresholds, ``gate`` gathers and records."""
