"""The attention plan and its execution: who reads which pages together, then partial, then
merge.
"""
