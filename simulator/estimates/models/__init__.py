"""The architecture of models: the sizes and the work of their layers, without a measurement."""
