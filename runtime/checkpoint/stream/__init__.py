"""The writing of checkpoint files to disk while training continues."""
