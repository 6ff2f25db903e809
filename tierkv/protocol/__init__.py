"""What goes over the daemon's socket, as bytes and as values. No I/O."""
