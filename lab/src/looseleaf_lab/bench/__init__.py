"""Speed, measured against a baseline in the same run and appended to ``results/`` with its
origin.
"""
