"""Discovered documents: the same tokens, only seen ones, parted by salt and lead."""

import numpy as np

from looseleaf.prompt.cutting import Cutter
from looseleaf.prompt.discover import DiscoverLimits, Discovery, num_discovered
from looseleaf.prompt.request import DocumentPart, PromptParts, TextPart
from tests.prompt.test_cutting import LINE_END, MARKER, SIZE, cutter, lines

LEAD = (2, 3, 4, LINE_END, MARKER)
LIMITS = DiscoverLimits(min_lead=2, max_lead=16, min_seen=16, min_share=0.25)
A, B, C = lines(1, 20), lines(2, 20), lines(3, 20)
QUESTION = (MARKER, 5, 6, 7)


def prompt(*texts: tuple[int, ...], lead: tuple[int, ...] = LEAD) -> PromptParts:
    tokens = [token for text in texts for token in (*text, MARKER)]
    return (TextPart((*lead, *tokens, *QUESTION), opens_answer=True),)


def tokens_of(parts: PromptParts) -> list[int]:
    return [token for part in parts for token in part.tokens]


def apply(discovery: Discovery, parts: PromptParts, salt: str = "", lead: int = 5) -> PromptParts:
    pieces = discovery.apply(parts, lead, salt)
    assert tokens_of(pieces) == tokens_of(parts)
    assert isinstance(pieces[-1], TextPart) and pieces[-1].opens_answer
    return pieces


def make(limits: DiscoverLimits = LIMITS) -> Discovery:
    return Discovery(cutter(), limits)


def test_moved_texts_become_documents_and_first_texts_remain_exact() -> None:
    discovery = make()
    assert apply(discovery, prompt(A, B)) == prompt(A, B)
    pieces = apply(discovery, prompt(B, A))
    assert num_discovered(pieces) >= 0.8 * (len(A) + len(B))
    assert {p.context_length for p in pieces if isinstance(p, DocumentPart)} == {len(LEAD)}


def test_a_continued_exact_prompt_remains_exact() -> None:
    discovery = make()
    apply(discovery, prompt(A, B))
    assert num_discovered(apply(discovery, prompt(A, B, C))) == 0


def test_the_prefix_of_an_exact_prompt_remains_text() -> None:
    discovery = make()
    apply(discovery, prompt(A, B, C))
    pieces = apply(discovery, prompt(A, C, B))
    shared = len(LEAD) + len(A)
    assert isinstance(pieces[0], TextPart) and len(pieces[0].tokens) >= shared // 32 * 32
    assert num_discovered(pieces) > 0


def test_other_salts_and_other_leads_have_seen_nothing() -> None:
    discovery = make()
    apply(discovery, prompt(A, B), "red")
    assert num_discovered(apply(discovery, prompt(B, A), "blue")) == 0
    other = (2, 3, 9, LINE_END, MARKER)
    assert num_discovered(apply(discovery, prompt(B, A, lead=other), "red")) == 0
    assert num_discovered(apply(discovery, prompt(B, A), "red")) > 0


def test_a_small_share_of_seen_tokens_is_answered_exactly() -> None:
    discovery = make(DiscoverLimits(2, 16, 16, min_share=0.9))
    apply(discovery, prompt(A))
    assert num_discovered(apply(discovery, prompt(B, A))) == 0


def test_the_memory_forgets_its_oldest_pieces() -> None:
    discovery = make(DiscoverLimits(2, 16, 16, 0.25, most_tokens=len(C)))
    apply(discovery, prompt(A))
    apply(discovery, prompt(C))
    assert num_discovered(apply(discovery, prompt(B, A))) == 0


def test_a_long_lead_is_cut_at_a_line_end() -> None:
    discovery, ids = Discovery(cutter(), LIMITS), lines(9, 30)
    apply(discovery, prompt(A, B, lead=ids), lead=len(ids))
    pieces = apply(discovery, prompt(B, A, lead=ids), lead=len(ids))
    (length,) = {p.context_length for p in pieces if isinstance(p, DocumentPart)}
    assert length <= 16 and ids[length - 1] == LINE_END


def test_marked_documents_remain_as_they_are() -> None:
    discovery = make()
    apply(discovery, prompt(A, B))
    document = DocumentPart((9, 8, 7), len(LEAD), "own")
    parts = (TextPart(LEAD), document, *prompt(B, A, lead=(MARKER,)))
    pieces = apply(discovery, parts)
    assert pieces[1] is document
    assert num_discovered(pieces) > 0


def test_a_cutter_reads_flags_of_its_vocabulary() -> None:
    flags = np.zeros(SIZE, bool)
    assert Cutter(flags, flags).line_end((5,) * 40, 2, 16) == 16
