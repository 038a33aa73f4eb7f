"""Published facts of machines, by preset."""
