"""The generated world of documents and questions that trains and tests the reference model.

Pure Python, without models and tensors. A seed determines everything. Seeds below
`TRAINING_SEEDS_START` are held out for evaluation, and so are all made-up names in their worlds.
"""

from looseleaf_lab.evals.world.generate import (
    MAX_HOPS,
    TRAINING_SEEDS_START,
    World,
    WorldConfig,
    WorldDocument,
    make_world,
)
from looseleaf_lab.evals.world.long_tasks import (
    CountTokens,
    RollCall,
    call_roll,
    count_words,
    lines_right,
    make_deep_chain,
    make_look_alike,
    make_lookups,
    make_needle,
    make_needles,
    make_roll_call,
    numbered_lines,
)
from looseleaf_lab.evals.world.tasks import (
    NO_ANSWER,
    TASKS,
    Example,
    Question,
    ask,
    is_correct,
    make_example,
)

__all__ = [
    "MAX_HOPS",
    "NO_ANSWER",
    "TASKS",
    "TRAINING_SEEDS_START",
    "CountTokens",
    "Example",
    "Question",
    "RollCall",
    "World",
    "WorldConfig",
    "WorldDocument",
    "ask",
    "call_roll",
    "count_words",
    "is_correct",
    "lines_right",
    "make_deep_chain",
    "make_example",
    "make_look_alike",
    "make_lookups",
    "make_needle",
    "make_needles",
    "make_roll_call",
    "make_world",
    "numbered_lines",
]
