"""The blocks of the page on frameworks run as printed, but for the address of the server."""

import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT, blocks

PRINTED = "http://127.0.0.1:8000"
PAGE = [b for b in blocks(ROOT / "docs" / "howto" / "clients.md") if b.language == "python"]


@pytest.mark.parametrize("block", PAGE, ids=lambda block: block.text.split()[1])
def test_a_block_prints_an_answer(server, block):
    assert PRINTED in block.text
    text = block.text.replace(PRINTED, server.url.rstrip("/"))
    command = [sys.executable, "-W", "ignore", "-c", text]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    last = process.stdout.strip().splitlines()[-1]
    assert last == "The archive is in the north wing." or last.isdigit()
