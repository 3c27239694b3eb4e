"""The commands of the command line, one file each: its arguments and what it does."""
