"""A check that one question gets one answer at every entry point."""
