"""Builders of schedules: they turn a workload, with a plan or another strategy, into a graph of ops."""
