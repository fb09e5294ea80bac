"""The command line: one module for each command. Imports are inside the commands, so that it starts at once."""
