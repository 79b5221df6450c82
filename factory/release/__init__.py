"""Releases a judged candidate: approvals, checks, the release itself, the folder that servers read, and GGUF files."""
