"""The gate of patches that change what is learnt. It judges paired runs of both recipes by bits per byte. ``gate`` has its stages."""
