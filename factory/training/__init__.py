"""Segments: planned, certified, trained, averaged, exported. ``planning`` says what comes next, ``training`` runs it."""
