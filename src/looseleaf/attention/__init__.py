"""The attention plan and its execution: rows that share pages read them together, as partial states
that a merge joins.
"""
