"""The text of removed documents is overwritten, wherever the workspace holds it."""
