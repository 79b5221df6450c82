"""Reads requests in the form of OpenAI's API. ``request`` reads a request; ``defaults`` reads the sampling defaults of an export."""
