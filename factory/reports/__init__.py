"""Pages and lines for people: a candidate's report, a proposal's, and where a release came from."""
