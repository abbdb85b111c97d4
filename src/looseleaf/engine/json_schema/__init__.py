"""JSON schemas for the grammar library, rewritten or rejected where it would violate them."""

from looseleaf.engine.json_schema.support import FORMATS, library_schema

__all__ = ["FORMATS", "library_schema"]
