"""Facts about this host: its cores, their NUMA nodes, memory, ranks and PCI addresses."""
