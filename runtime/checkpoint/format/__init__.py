"""Files as they lie on disk: torch-loadable, checksummed, named by a manifest."""
