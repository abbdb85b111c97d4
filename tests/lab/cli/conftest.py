"""The command line's fixtures, for the commands of the lab."""

from tests.cli.conftest import model as model
from tests.cli.conftest import run as run
