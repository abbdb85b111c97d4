"""Metrics of a free answer against right answers: word F1, exact match, containment, Rouge-L.

Word F1 and exact match follow SQuAD (Rajpurkar et al., 2016): lower case, without punctuation
and articles. Rouge-L is that of the package ``rouge-score`` (extra ``evals``)."""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from looseleaf.errors import InvalidOption
from looseleaf_lab.errors import INSTALL

Metric = Callable[[str, Sequence[str]], float]
"""The score of a text against several right answers: the maximum over them."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def exact(text: str, answers: Sequence[str]) -> float:
    """1 if the words equal an answer's words, in order."""
    return float(any(normalize(text) == normalize(answer) for answer in answers))


def contains(text: str, answers: Sequence[str]) -> float:
    """1 if the text contains an answer's words in sequence. An answer that normalizes to no words
    ("A", as a choice) matches only a text that does so too."""
    words = normalize(text)
    text_words = " ".join(["", *words, ""])
    answer_words = [normalize(answer) for answer in answers]
    return float(
        any(
            " ".join(["", *words_of_answer, ""]) in text_words if words_of_answer else not words
            for words_of_answer in answer_words
        )
    )


def word_f1(text: str, answers: Sequence[str]) -> float:
    """The harmonic mean of the precision and recall of words, as bags."""
    return max((_f1(normalize(text), normalize(answer)) for answer in answers), default=0.0)


def rouge_l(text: str, answers: Sequence[str]) -> float:
    """F-measure of the longest common subsequence of stems. Raises InvalidOption without the
    package."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise InvalidOption(f"Rouge-L needs rouge-score: {INSTALL}") from error
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    return max((scorer.score(answer, text)["rougeL"].fmeasure for answer in answers), default=0.0)


METRICS: Mapping[str, Metric] = MappingProxyType(
    {"f1": word_f1, "exact": exact, "contains": contains, "rouge-l": rouge_l}
)


def _f1(predicted: list[str], expected: list[str]) -> float:
    if not predicted or not expected:
        return float(predicted == expected)
    common = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * common / (len(predicted) + len(expected))
