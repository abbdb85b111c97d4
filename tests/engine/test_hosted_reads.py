"""What a request says that its rows read of hosted documents, against what was counted of them."""

from pathlib import Path
from typing import Any

import pytest

from looseleaf import LLM, SamplingParams
from looseleaf.config import IndexConfig, Select
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.index.host.attend import HostedCounters
from tests.engine.harness import GREEDY, Folder, document

LONG = 700
FEW = Select("retrieval", tokens=40)
FLAT, IVF, GRAPH = (
    IndexConfig("flat", sink=4, local=12),
    IndexConfig("ivf", sink=4, local=12),
    IndexConfig("graph", sink=4, local=12, degree=8, top=20),
)


def make(folder: Path, **options: Any) -> LLM:
    options = {"num_pages": 256, "max_model_len": 1024, "dtype": "float32", **options}
    return LLM(folder, device="cpu", **options)


def ask(llm: LLM, select: Select, params: SamplingParams = GREEDY) -> RequestOutput:
    prompt = ["Read this. ", document(0, LONG, context="alone"), "What stands in it?"]
    return llm.generate([prompt], params, select=select)[0]


@pytest.mark.parametrize("index", [FLAT, IVF, GRAPH], ids=["flat", "ivf", "graph"])
@pytest.mark.parametrize(
    "select",
    [
        FEW,
        Select("retrieval", tokens=40, layer_budgets=(1.0, 5.0, 2.0)),
        Select("retrieval", tokens=40, dense_layers=(1,)),
        Select("retrieval", tokens=40, dense_below=2048),
        Select("retrieval", ratio=1.0),
    ],
    ids=["few", "by layer", "a dense layer", "dense below", "all"],
)
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_request_reports_the_keys_that_its_rows_read_of_hosted_documents(
    checkpoint: Folder, index: IndexConfig, select: Select, kernels: str
) -> None:
    llm = make(checkpoint("llama", "dynamic"), cpu_kernels=kernels)
    llm.host(document(0, LONG, context="alone"), index=index)
    hosted = llm.engine.runner.attention.hosted
    assert hosted is not None
    hosted.counters = counters = HostedCounters()
    report = ask(llm, select).select
    assert report is not None and counters.keys > 0
    assert (report.keys_read, report.keys_there) == (counters.keys_read, counters.keys)
    assert report.exposure == counters.share_read
    assert report.pages_held == 0
    chose = counters.keys_read < counters.keys
    steps = report.chosen_steps, report.dense_steps
    assert steps == ((sum(steps), 0) if chose else (0, sum(steps)))


def test_the_line_about_selection_speaks_of_keys_where_keys_are_chosen(checkpoint: Folder) -> None:
    llm = make(checkpoint("llama", "dynamic"))
    segment = llm.host(document(0, LONG, context="alone"), index=GRAPH)
    output = ask(llm, FEW)
    assert output.select is not None
    steps = output.select.chosen_steps
    assert steps == output.attention.decode_steps > 0
    assert str(output.select) == (
        f"select: retrieval, tokens 40; {steps} of {steps} rows chose, "
        f"{40 / segment.num_tokens:.1%} of all keys of hosted documents were read"
    )


def test_keys_that_an_index_leaves_out_are_not_among_those_a_request_read(
    checkpoint: Folder,
) -> None:
    llm = make(checkpoint("llama", "dynamic"))
    segment = llm.host(document(0, LONG, context="alone"), index=GRAPH)
    whole, few = (ask(llm, s).attention for s in (Select("retrieval", ratio=1.0), FEW))
    assert whole.decode_steps == few.decode_steps > 0
    assert whole.keys_read - few.keys_read == few.decode_steps * (segment.num_tokens - 40)


@pytest.mark.parametrize("revise", [None, 3])
def test_documents_whose_indexes_compare_other_dtypes_are_read_in_one_step(
    checkpoint: Folder, revise: int | None
) -> None:
    """Each request as by itself, also one that reads both documents."""
    llm = make(checkpoint("llama", "dynamic"))
    documents = [document(n, LONG // 2, context="alone") for n in range(2)]
    for text, keys in zip(documents, ("stored", "int8"), strict=True):
        llm.host(text, index=IndexConfig("flat", sink=4, local=12, keys=keys))  # type: ignore[arg-type]
    prompts = [["Read. ", *some, "What?"] for some in (documents, documents[:1], documents[1:])]
    params, more = SamplingParams(max_tokens=12, seed=5, ignore_eos=True), {"revise": revise}
    alone = [llm.generate([p], params, select=FEW, **more)[0].token_ids for p in prompts]  # type: ignore[arg-type]
    together = llm.generate(prompts, params, select=FEW, **more)  # type: ignore[arg-type]
    assert [output.token_ids for output in together] == alone
