"""Builders of schedules: each turns a workload and a strategy (such as a plan) into a graph of ops."""
