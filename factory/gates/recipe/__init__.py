"""The gate of patches that change what is learnt: paired runs of both recipes, judged by bits per byte. ``gate`` has its stages."""
