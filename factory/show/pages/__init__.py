"""Reports for people: the page of a candidate, the page of a proposal, and provenance."""
