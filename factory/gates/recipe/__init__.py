"""The gate of proposals that change what is learnt: short runs beside the baseline's, and a verdict."""
