"""Commands about data: where it went, what is taken out, and how a run compares with another. ``factory.cli`` adds them to the app."""
