"""The format of checkpoint files on disk: loadable by torch, checksummed, and listed in a manifest."""
