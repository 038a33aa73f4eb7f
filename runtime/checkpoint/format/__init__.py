"""The format of checkpoint files on disk. torch can load them, and a manifest lists them with their checksums."""
