"""Check that all entry points of ebbtide give the same answer to the same planning question."""
