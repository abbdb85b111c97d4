"""How a free answer is compared with what is right: word F1, exact match, containment, Rouge-L.

Word F1 and exact match are SQuAD's (Rajpurkar et al., 2016): lower case, without punctuation and
articles. Rouge-L is that of the package ``rouge-score`` (extra ``evals``)."""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from looseleaf.errors import InvalidOption, install

Metric = Callable[[str, Sequence[str]], float]
"""The score of a text against several right answers: the best of them counts."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> list[str]:
    """The words that count, in order."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def exact(text: str, answers: Sequence[str]) -> float:
    """1 if the words are those of an answer, in order."""
    return float(any(normalize(text) == normalize(answer) for answer in answers))


def contains(text: str, answers: Sequence[str]) -> float:
    """1 if an answer's words stand in the text, next to each other. An answer without words that
    count ("A", as a choice) is in a text without any, not in all of them."""
    words = normalize(text)
    said = " ".join(["", *words, ""])
    wanted = [normalize(answer) for answer in answers]
    return float(any(" ".join(["", *one, ""]) in said if one else not words for one in wanted))


def word_f1(text: str, answers: Sequence[str]) -> float:
    """The harmonic mean of the words' precision and recall, as bags."""
    return max((_f1(normalize(text), normalize(answer)) for answer in answers), default=0.0)


def rouge_l(text: str, answers: Sequence[str]) -> float:
    """F-measure of the longest common subsequence, with stems. Raises InvalidOption without the
    package."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise InvalidOption(f"Rouge-L needs rouge-score: {install('evals')}") from error
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    return max((scorer.score(one, text)["rougeL"].fmeasure for one in answers), default=0.0)


METRICS: Mapping[str, Metric] = MappingProxyType(
    {"f1": word_f1, "exact": exact, "contains": contains, "rouge-l": rouge_l}
)


def _f1(said: list[str], right: list[str]) -> float:
    if not said or not right:
        return float(said == right)
    common = sum((Counter(said) & Counter(right)).values())
    return 2 * common / (len(said) + len(right))
