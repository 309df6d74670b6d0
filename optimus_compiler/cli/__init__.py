"""The `optimus` command line: one file a command."""
