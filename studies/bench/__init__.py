"""Code that several studies share: training runs, clocks, result files, and comparisons of tensors."""
