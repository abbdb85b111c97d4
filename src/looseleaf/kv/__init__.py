"""Stored keys and values: segment identity, the page pool, the segment store, page summaries."""
