"""The process of one case: prints its rows as lines of JSON."""

import json
import sys

from looseleaf_lab.bench.llamacpp.case import FileCase
from looseleaf_lab.bench.llamacpp.measures import measure_file

fields = json.loads(sys.argv[1])
for row in measure_file(FileCase(**fields | {"parts": tuple(fields["parts"])})):
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
