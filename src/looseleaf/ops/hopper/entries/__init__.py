"""Rotation of work-list rows in the Hopper kernel; not an operator."""
