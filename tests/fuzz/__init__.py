"""Random input for the command line, and the checks that it stands up to it."""
