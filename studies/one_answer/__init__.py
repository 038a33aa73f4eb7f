"""Check that the same planning question gets the same answer at every entry point."""
