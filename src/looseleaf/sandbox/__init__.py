"""Runs untrusted templates, regexes and grammars in child processes under limits.

`Sandbox` limits a job's time, memory and output. `FairThreads` shares threads between tenants, so
slow jobs of a tenant delay no other tenant.
"""

from looseleaf.sandbox.fair_threads import FairThreads
from looseleaf.sandbox.process import Limits
from looseleaf.sandbox.sandbox import Sandbox

__all__ = ["FairThreads", "Limits", "Sandbox"]
