"""The commands of ``tune``, a file each."""
