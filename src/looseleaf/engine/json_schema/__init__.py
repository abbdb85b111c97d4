"""JSON schemas as the grammar library keeps them: rewritten where it reads them otherwise, refused
where it takes one that it does not keep.
"""

from looseleaf.engine.json_schema.support import FORMATS, library_schema

__all__ = ["FORMATS", "library_schema"]
