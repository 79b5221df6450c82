"""Erases the text of removed documents from all files of the workspace."""
