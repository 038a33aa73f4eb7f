"""The checks of ``tune doctor``: problems of this machine for training under a plan, and their fixes."""
