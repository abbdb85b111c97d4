"""Work on untrusted input, in processes that can be ended: templates, regexes, grammars.

`Sandbox` runs one job under limits of time, memory and output. `Turns` shares threads fairly
between tenants, so that a tenant's slow jobs never delay another's.
"""

from looseleaf.sandbox.process import Limits
from looseleaf.sandbox.sandbox import Sandbox
from looseleaf.sandbox.turns import Turns

__all__ = ["Limits", "Sandbox", "Turns"]
