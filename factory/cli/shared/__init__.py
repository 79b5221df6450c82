"""What commands in every folder of the command line share; it knows no command."""
