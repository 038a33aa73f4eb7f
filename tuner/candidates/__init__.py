"""A training plan as a plan search holds it, and changes of such a plan."""
