"""All tasks and arms, by their names on the command line."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from looseleaf.llm.llm import LLM
from looseleaf_lab.evals.arms import EngineArm, Form, HostedArm, PrefixArm
from looseleaf_lab.evals.interview import Interview
from looseleaf_lab.evals.one_by_one import MapReduceArm, MapRerankArm
from looseleaf_lab.evals.task import Arm, Task
from looseleaf_lab.evals.world import MAX_HOPS, CountTokens, count_words
from looseleaf_lab.evals.world_tasks import LookupsTask, NeedleTask, RollCallTask, WorldTask


@dataclass(frozen=True)
class Sizes:
    """Sizes of items; a task uses the ones that apply. ``count`` returns a text's number of tokens;
    ``per_context`` is the number of questions per context."""

    documents: int = 6
    lines: int = 40
    tokens: tuple[int, ...] = (1024,)
    count: CountTokens = count_words
    per_context: int = 1


DEEP_HOPS = MAX_HOPS + 1


def _chains(sizes: Sizes) -> list[Task]:
    return [WorldTask("chain", hops, sizes.documents) for hops in range(1, MAX_HOPS + 1)]


def _plain(name: str) -> Callable[[Sizes], list[Task]]:
    return lambda sizes: [WorldTask(name, documents=sizes.documents)]


def _lookups(sizes: Sizes) -> list[Task]:
    if sizes.per_context == 1:
        return [WorldTask("lookup", documents=sizes.documents)]
    return [LookupsTask(sizes.documents, sizes.per_context)]


def _needles(sizes: Sizes) -> list[Task]:
    return [NeedleTask(tokens, sizes.count, sizes.per_context) for tokens in sizes.tokens]


TASKS: Mapping[str, Callable[[Sizes], list[Task]]] = MappingProxyType(
    {
        "lookup": _lookups,
        "bridge": _plain("bridge"),
        "chain": _chains,
        "unanswerable": _plain("unanswerable"),
        "look-alike": _plain("look-alike"),
        "deep-chain": lambda sizes: [WorldTask("chain", DEEP_HOPS, sizes.documents)],
        "roll-call": lambda sizes: [RollCallTask(sizes.lines, sizes.documents)],
        "needle": _needles,
        "interview": lambda sizes: [Interview(sizes.lines, sizes.documents)],
    }
)
"""Task names with their factories; a task in several settings gives several tasks."""


def _full(llm: LLM, form: Form | None) -> Arm:
    return EngineArm(llm, "full attention", "prompt", form=form)


def _reuse(llm: LLM, form: Form | None) -> Arm:
    return EngineArm(llm, "documents reused", "lead", form=form)


ARMS: Mapping[str, Callable[[LLM, Form | None], Arm]] = MappingProxyType(
    {
        "full": _full,
        "reuse": _reuse,
        "prefix": PrefixArm,
        "map-reduce": MapReduceArm,
        "map-rerank": MapRerankArm,
        "hosted": lambda llm, form: HostedArm(llm, 1.0, form=form),
        "flat": lambda llm, form: HostedArm(llm, 0.05, kind="flat", form=form),
        "graph": lambda llm, form: HostedArm(llm, 0.05, form=form),
        "ivf": lambda llm, form: HostedArm(llm, 0.05, kind="ivf", form=form),
    }
)
"""Arms that need only a model. Policies with settings are `EngineArm`s."""


def make_tasks(names: tuple[str, ...], sizes: Sizes) -> list[Task]:
    """The tasks of these names, in all their settings."""
    return [task for name in names for task in TASKS[name](sizes)]
