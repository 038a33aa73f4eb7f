"""Functions that measure how fast a machine copies, computes, updates optimizer state and uses its drives.

Each activity is measured alone. Some are also measured while another activity runs, or while several ranks run the
activity at the same time.
"""
