"""The texts of the default primer: made-up passages of an encyclopedia, in English.

A primer replaces the neighbours that a document lacks when it is computed separately. Its facts do
not matter, since no request reads it; its form is that of usual passages."""

from collections.abc import Sequence
from pathlib import Path

from looseleaf.errors import InvalidOption

DEFAULT = "default"
"""The name of the default primer on command lines."""

PASSAGES = (
    "Harrow Bridge\n\n"
    "Harrow Bridge is a stone bridge across the river Tarn in the north of the "
    "province. It was built between 1764 and 1771 by the engineer Thomas Willard and "
    "was widened in 1902. The bridge has five arches and a total length of 118 metres. "
    "It carries the road between the market town of Ellerby and the village of "
    "Coldwater.",
    "Margaret Ashby\n\n"
    "Margaret Ellen Ashby (12 March 1871 – 4 October 1949) was a painter and teacher. "
    "She was the second daughter of the physician Edward Ashby and his wife Clara. "
    "After studying in Paris she taught drawing at the Northern School of Art for "
    "twenty-six years. Her best known work is a series of twelve landscapes, which the "
    "city museum acquired in 1934.",
    "The Lantern Keeper (film)\n\n"
    "The Lantern Keeper is a 1953 drama film directed by Robert Hale and starring Anna "
    "Petrov, James Corder and Louis Martin. The story follows a lighthouse keeper who "
    "finds a letter from his brother. The film was produced by Summit Pictures, and its"
    " music was composed by Henry Vale.",
    "Battle of Kestrel Hill\n\n"
    "The Battle of Kestrel Hill was fought on 9 September 1642 between the forces of "
    "Lord Daventry and those of the city council. About 3,000 men took part. The "
    "council's troops held the hill until the evening and then retreated to the south. "
    "The battle ended the campaign of that year, and a treaty was signed in November.",
    "Osmia County\n\n"
    "Osmia County is a county in the western part of the state. As of the 2010 census, "
    "the population was 41,318. Its county seat and largest city is Fairmont. The "
    "county was founded in 1858 and named after the surveyor Peter Osmia. Agriculture, "
    "timber and tourism are its most important industries.",
    "Silver Rain (album)\n\n"
    "Silver Rain is the third studio album by the band The Quiet Hours, released on 21 "
    "May 1987 by Meridian Records. It reached number fourteen on the national chart and"
    ' was certified gold in the following year. The single "Over the Water" was written'
    " by the band's guitarist, Daniel Frost, and became their most successful song.",
)


def read_primer(names: Sequence[str]) -> tuple[str, ...]:
    """The texts of a primer: `PASSAGES` for the name "default", else those of files.

    Raises InvalidOption for a file that is not readable, or blank."""
    texts: list[str] = []
    for name in names:
        if name == DEFAULT:
            texts += PASSAGES
            continue
        try:
            text = Path(name).read_text(encoding="utf-8-sig").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidOption(f"--primer {name} can't be read: {error}") from error
        if not text:
            raise InvalidOption(f"--primer {name} is empty: give a text, or {DEFAULT}")
        texts.append(text)
    return tuple(texts)
