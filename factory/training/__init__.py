"""Plans, certifies, trains, averages and exports segments. ``planning`` decides the next segment, ``training`` runs it."""
