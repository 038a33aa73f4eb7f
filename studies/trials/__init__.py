"""Training runs that several studies share: one variant of training per process, or several plans on one
engine.
"""
