"""Reports for people: the pages of candidates, proposals and diagnoses, and provenance."""
