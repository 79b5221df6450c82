"""The recipe gate judges patches that change what the model learns, by the bits per byte of paired runs of both recipes. ``gate`` has its stages."""
