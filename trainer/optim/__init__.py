"""The update of the weights: AdamW and Muon, their groups and schedules."""
