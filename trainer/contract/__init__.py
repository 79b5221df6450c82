"""What a run is held to: recipe, data and their order, checkpoint format, plans. The factory's own processes import it,
so no agent may patch it, and it imports nothing that they may.
"""
