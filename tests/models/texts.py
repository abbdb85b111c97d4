"""What users may type, and the byte-level tokenizer that tests read it with."""

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from looseleaf.models import Tokenizer
from looseleaf.models.tokenizer.chat_template import CLOSE, DOCUMENT_CUT, OPEN
from tests.checkpoints import MARKERS, write_tokenizer

user_text = st.lists(
    st.sampled_from([*MARKERS, OPEN, CLOSE, DOCUMENT_CUT, "<|", "|>", "end", " ", "\n", "é", "😀"])
    | st.text(max_size=4),
    max_size=8,
).map("".join)


def load(folder: Path, **settings: Any) -> Tokenizer:
    write_tokenizer(folder, **settings)
    return Tokenizer(folder)
