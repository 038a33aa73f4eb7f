"""Check that the command line, the Python functions and the HTTP service give the same answer to the same
planning question.
"""
