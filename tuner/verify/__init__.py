"""The comparison of a script's training under a plan, stock and without offload, for ``tune verify``."""
