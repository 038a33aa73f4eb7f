"""Builders of schedules: a workload and a plan (or a peer's strategy) become a DAG of ops."""
