"""What commands share, in this folder and in those below it."""
