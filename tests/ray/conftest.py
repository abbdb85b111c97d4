"""A suite of its own, `make test-ray`: Ray is large, and warns at import."""

import os

collect_ignore_glob = [] if os.environ.get("RAY_TESTS") == "1" else ["test_*.py"]
