"""Memory, link traffic and utilization over the phases of a stock DeepSpeed iteration."""
