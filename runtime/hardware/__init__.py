"""Facts about this host: its CPU cores and NUMA nodes, its memory, the training ranks on it, and the PCI addresses of
its GPUs.
"""
