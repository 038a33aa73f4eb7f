"""Training runs that several studies share: one variant per process, or several plans on one engine."""
