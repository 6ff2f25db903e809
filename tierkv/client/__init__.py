"""The client of the daemon; needs no torch."""
