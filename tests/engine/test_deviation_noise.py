"""Which tokens are computed again does not depend on how sums were rounded."""

from looseleaf import Fuse
from looseleaf.prompt.request import Request
from tests.engine.harness import GREEDY, Folder, document, make_llm

# a window that is shorter: what stands further back in a document sees it alone, and never deviates
TWICE = document(7, 30)


def test_tokens_that_do_not_deviate_are_chosen_alike_however_steps_are_cut(
    checkpoint: Folder,
) -> None:
    chosen = []
    for most in (9, 11, 17, 2048):
        options = {"max_num_seqs": 1, "max_num_batched_tokens": most}
        llm = make_llm(checkpoint("phi3", "longrope"), **options)
        parts = llm.engine.prompts.from_parts([TWICE, TWICE, "who?"])
        fuse = Fuse("deviation", ratio=0.6)
        progress = llm.engine.add(Request("asks", parts, GREEDY, fuse=fuse))
        fusion = progress.outputs[0].sequence.fusion
        assert fusion is not None
        while not len(fusion.chosen_positions or ()):
            llm.engine.step()
        chosen.append([int(position) for position in fusion.chosen_positions or ()])
        llm.close()
    assert chosen == [chosen[0]] * len(chosen)
