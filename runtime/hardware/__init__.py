"""Facts about this host: cores and their NUMA nodes."""
