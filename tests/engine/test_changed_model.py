"""A checkpoint that was changed in its folder is another model to what outlives the process."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.engine.harness import ask
from tests.engine.tiered import PARAMS, load_always, prompts, sources, tiered


def test_a_model_with_one_changed_row_finds_nothing_of_the_old_one(tmp_path: Path) -> None:
    folder, path = make_checkpoint(tmp_path / "model"), tmp_path / "model" / "model.safetensors"
    for changed in (False, True):
        if changed:
            tensors = load_file(path)
            tensors["model.embed_tokens.weight"][77] += 1
            save_file(tensors, path, metadata={"format": "pt"})
        llm = tiered(folder, tmp_path / "cache")
        load_always(llm)
        assert sources(ask(llm, prompts(1), PARAMS)[0].output) == ["computed"]
        llm.close()
    with tiered(folder, tmp_path / "cache") as llm:
        load_always(llm)
        assert sources(ask(llm, prompts(1), PARAMS)[0].output) == ["loaded"]
