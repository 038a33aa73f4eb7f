"""The calibration of a machine's rates by measured training runs, and the intervals of predicted times."""
