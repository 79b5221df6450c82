"""The contract of a run: recipe, data and their order, checkpoint format, plans. The factory's own processes import it, so agents may not
patch it, and it imports no module that they may patch.
"""
