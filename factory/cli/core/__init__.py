"""Code that the commands in this folder and in the folders beside it share."""
