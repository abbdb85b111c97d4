"""Laws: a GGUF file is the model that it was made from; a damaged file is a sentence."""

import dataclasses
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter

from looseleaf.config import EngineConfig
from looseleaf.errors import CheckpointNotFound, CorruptCheckpoint, ModelError, UnsupportedModel
from looseleaf.llm import load as loading
from looseleaf.models import Tokenizer, find_checkpoint, load_weights, read_config
from looseleaf.models.checkpoint.fingerprint import model_fingerprint
from looseleaf.models.checkpoint.gguf import folder as gguf_folder
from looseleaf.models.checkpoint.gguf.container import read_container
from looseleaf.models.experts import apply_experts
from looseleaf.models.quantized import QuantizedWeight
from looseleaf.ops.dense.quantized_linear import beats_packed_bfloat16
from tests.checkpoints import FAMILIES, LATENT_FAMILIES, make_model, write_checkpoint
from tests.models.gguf_files import write_gguf

_SAFETENSORS = ("phi", "mistral", "glm", "gemma4_text")
CONVERTED = [f for f in FAMILIES if f not in _SAFETENSORS]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path / "cache" / "native")
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "llama.gguf", make_model("llama"))


def leaves(value: Any) -> list[Any]:
    """The tensors of nested named tuples, dataclasses and tuples, in order."""
    if value is None or isinstance(value, torch.Tensor | QuantizedWeight | bool | float):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [leaf for item in value for leaf in leaves(item)]


def rounded(value: Any) -> Any:
    """``value`` with all numbers in fp32, as files store them."""
    if isinstance(value, float):
        return torch.tensor(value).item()
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return tuple(map(rounded, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize("family", CONVERTED)
def test_a_file_has_the_weights_and_the_shape_of_its_model(family: str, tmp_path: Path) -> None:
    # the format states no window of Qwen's, and SmolLM3's layers without RoPE are every fourth
    more: dict[str, Any] = {
        "qwen2": {"use_sliding_window": False},
        "smollm3": {"no_rope_layers": [1, 1, 1]},
        "gpt_oss": {"swiglu_limit": 7.0},
        "exaone4": {"layer_types": ["sliding_attention"] * 3},
        "gemma3_text": {"layer_types": ["sliding_attention"] * 3},
        "phi3": {"original_max_position_embeddings": 256},
        "mixtral": {"sliding_window": None},
        "qwen2_moe": {"use_sliding_window": False, "mlp_only_layers": []},
        "qwen3_moe": {"norm_topk_prob": True, "mlp_only_layers": []},
    }.get(family, {})
    model = make_model(family, "yarn" if family in LATENT_FAMILIES else "default", **more)
    if family in LATENT_FAMILIES:
        model.config.rope_parameters |= {"mscale": 0.7, "mscale_all_dim": 0.7}
    folder = write_checkpoint(tmp_path / "model", model)
    converted = find_checkpoint(write_gguf(tmp_path / "model.gguf", model))
    expected, shape = read_config(folder), read_config(converted)
    if family == "gemma3_text":
        # files of this architecture store one base, that of layers without a window
        local = dataclasses.replace(expected.layer_ropes[0], theta=10_000.0)
        expected = dataclasses.replace(expected, layer_ropes=(local,) * 3)
        scale = expected.head_dim**-0.5
        expected = dataclasses.replace(expected, softmax_scale=scale)
    if family == "glm4_moe_lite":
        # another name of the same law
        expected = dataclasses.replace(expected, family="deepseek_v3")
    if family == "gemma2":
        expected = dataclasses.replace(expected, softmax_scale=expected.head_dim**-0.5)
    written, stated = (dataclasses.asdict(c) | {"torch_dtype": ""} for c in (expected, shape))
    assert rounded(stated) == rounded(written)
    models = ((folder, expected), (converted, shape))
    weights = (load_weights(f, s, torch.float32, packed=False) for f, s in models)
    pairs = [*zip(*map(leaves, weights), strict=True)]
    assert len(pairs) > 20
    # the offset of a norm is added and subtracted again
    tolerance = 1e-6 if "gemma" in family else 0.0
    for left, right in pairs:
        assert isinstance(left, torch.Tensor) == isinstance(right, torch.Tensor)
        if isinstance(left, torch.Tensor):
            torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", ["mixtral", "granitemoe", "glm4_moe"])
def test_experts_stay_in_their_blocks(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    folder = find_checkpoint(write_gguf(tmp_path / "model.gguf", model, "Q8_0"))
    shape = read_config(folder).frozen_at(24)
    kept, plain = (load_weights(folder, shape, torch.float32, packed=p) for p in (True, False))
    for mine, exact in zip(kept.layers, plain.layers, strict=True):
        for name in ("gate_up", "down"):
            weight = getattr(mine, name).weight
            assert isinstance(weight, QuantizedWeight)
            torch.testing.assert_close(weight.dequantize(), getattr(exact, name).weight)
    normed = torch.randn(24, shape.hidden_size)
    mine, exact = (apply_experts(normed, w.layers[-1], shape) for w in (kept, plain))
    # activations are rounded to 8 bits
    assert (mine - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_maps_of_latents_and_wide_shared_experts_are_read_as_values(
    family: str, tmp_path: Path
) -> None:
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_shared_experts": 2}
    model = make_model(family, **sizes, **({"q_lora_rank": 32} if family == "deepseek_v3" else {}))
    folders = (
        find_checkpoint(write_gguf(tmp_path / "model.gguf", model, "Q8_0")),
        write_checkpoint(tmp_path / "model", model),
    )
    rounded, exact = (load_weights(f, read_config(f), torch.float32).layers[-1] for f in folders)
    assert rounded.latent is not None and exact.latent is not None
    for mine, other in (
        (rounded.latent.key_up, exact.latent.key_up),
        (rounded.latent.value_up, exact.latent.value_up),
        (rounded.gate_up.weight, exact.gate_up.weight),
        (rounded.down.weight, exact.down.weight),
    ):
        assert isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor)
        assert 0 < (mine - other).norm() < 0.01 * other.norm()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16", "BF16"])
def test_matrices_keep_their_format_and_its_values(kind: str, tmp_path: Path) -> None:
    model = make_model("llama", head_dim=32)
    path = write_gguf(tmp_path / f"{kind}.gguf", model, kind)
    folder = find_checkpoint(path)
    shape = read_config(folder)
    kept = load_weights(folder, shape, torch.float32).layers[0].qkv.weight
    plain = load_weights(folder, shape, torch.float32, packed=False).layers[0].qkv.weight
    assert isinstance(kept, QuantizedWeight)
    torch.testing.assert_close(kept.dequantize(), plain)
    half = load_weights(folder, shape, torch.bfloat16).layers[0].qkv.weight
    keeps = kind.startswith("Q") or (kind == "BF16" and beats_packed_bfloat16())
    assert isinstance(half, QuantizedWeight) == keeps
    without_c = load_weights(folder, shape, torch.float32, native=False).layers[0].qkv.weight
    assert isinstance(without_c, torch.Tensor)
    assert shape.torch_dtype == ("float16" if kind == "F16" else "bfloat16")
    layer = model.model.layers[0].self_attn
    exact = torch.cat([p.weight for p in (layer.q_proj, layer.k_proj, layer.v_proj)]).detach()
    step = {"Q8_0": 127, "Q4_0": 7, "F16": 1000, "BF16": 128}[kind]
    assert (plain - exact).abs().max() <= 1.01 * exact.abs().max() / step


def write_tokenizer(path: Path, kind: str, tokens: list[str], **arrays: Any) -> Path:
    """A file without tensors, whose vocabulary is ``tokens``."""
    writer = GGUFWriter(path, "llama")
    for name, value in {"embedding_length": 64, "block_count": 1, "context_length": 64}.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    for name, value in arrays.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


TEXTS = ["ab é b", "  a\n\n b\tab", "é😀", "a1234b", "<s>ab</s>", "a<unk>b", ""]


def test_scores_give_the_merges_of_sentencepiece(tmp_path: Path) -> None:
    from tests.models.test_sentencepiece import write_sentencepiece

    expected = Tokenizer(write_sentencepiece(tmp_path, "prepend"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "é", "▁▁", "▁▁a"]
    order = {"▁a": 0, "▁b": 1, "ab": 2, "▁ab": 3, "▁▁": 4, "▁▁a": 5}
    scores = [0.0] * 259 + [-1.0 - order.get(piece, 99) for piece in pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    arrays = {"token_scores": scores, "token_types": types, "bos_token_id": 1, "eos_token_id": 2}
    path = write_tokenizer(tmp_path / "s.gguf", "llama", tokens + pieces, **arrays)
    tokenizer = Tokenizer(find_checkpoint(path))
    for text in TEXTS:
        assert tokenizer.encode(text) == expected.encode(text), text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, frozenset([2]))


def test_a_template_and_merges_come_from_the_metadata(tmp_path: Path) -> None:
    from looseleaf.models.tokenizer.detokenizer import byte_alphabet

    alphabet = [*byte_alphabet()]
    arrays = {
        "token_merges": ["a b", "Ġ ab"],
        "token_types": [1] * (len(alphabet) + 2) + [3],
        "tokenizer_pre": "qwen2",
        "eos_token_id": len(alphabet) + 2,
        "chat_template": "{% for m in messages %}<e>{{ m['content'] }}{% endfor %}",
    }
    path = write_tokenizer(tmp_path / "b.gguf", "gpt2", [*alphabet, "ab", "Ġab", "<e>"], **arrays)
    tokenizer = Tokenizer(find_checkpoint(path))
    ab, spaced, end = (tokenizer.token_id(t) for t in ("ab", "Ġab", "<e>"))
    assert tokenizer.encode("ab ab") == [ab, spaced]
    assert tokenizer.encode("<e>") != [end] and tokenizer.eos_token_ids == {end}
    assert tokenizer.has_chat_template and tokenizer.bos_token_id is None


def test_a_split_file_is_one_model_and_a_lost_part_is_named(tmp_path: Path) -> None:
    from gguf import GGUFReader

    whole = write_gguf(tmp_path / "whole.gguf", make_model("qwen3"))
    reader = GGUFReader(whole)
    names = [tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    data, half = whole.read_bytes(), len(reader.tensors) // 2
    start = min(field.offset for field in reader.fields.values() if field.offset >= 24)
    fields_end = reader.tensors[0].field.offset
    for path, tensors in zip(names, (reader.tensors[:half], reader.tensors[half:]), strict=True):
        infos, content = b"", b""
        for tensor in tensors:
            content += bytes(-len(content) % 32)
            name = tensor.name.encode()
            infos += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(tensor.shape))
            infos += struct.pack(f"<{len(tensor.shape)}Q", *map(int, tensor.shape))
            infos += struct.pack("<IQ", tensor.tensor_type, len(content))
            content += tensor.data.tobytes()
        count = struct.unpack_from("<Q", data, 16)[0]
        head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), count) + data[start:fields_end]
        head += infos
        path.write_bytes(head + bytes(-len(head) % 32) + content)
    folder, expected = find_checkpoint(names[1]), find_checkpoint(whole)
    shape = read_config(folder)
    weights = (load_weights(f, shape, torch.float32, packed=False) for f in (folder, expected))
    for left, right in zip(*map(leaves, weights), strict=True):
        assert not isinstance(left, torch.Tensor) or torch.equal(left, right)
    names[0].unlink()
    with pytest.raises(CorruptCheckpoint, match=r"lacks m-00001-of-00002\.gguf"):
        find_checkpoint(names[1])


def test_other_weights_under_the_same_header_are_another_model(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(llama.read_bytes())
    before = model_fingerprint(find_checkpoint(path), whole=True)
    with path.open("r+b") as file:
        file.seek(-4, 2)
        file.write(struct.pack("<f", 7.0))
    assert model_fingerprint(find_checkpoint(path), whole=True) != before


def test_a_file_that_changes_while_it_loads_is_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(llama.read_bytes())

    def racing(*arguments: Any, **options: Any) -> Any:
        weights = load_weights(*arguments, **options)
        path.write_bytes(llama.read_bytes())
        return weights

    monkeypatch.setattr(loading, "load_weights", racing)
    with pytest.raises(CorruptCheckpoint, match=r"model\.gguf changed while the model was loaded"):
        loading.load_model(path, EngineConfig(device="cpu", dtype="float32"))


def test_without_a_writable_cache_the_folder_ends_with_the_process(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "process").mkdir()
    monkeypatch.setattr(gguf_folder, "can_write_to", lambda folder: False)
    monkeypatch.setattr(gguf_folder, "process_folder", lambda: tmp_path / "process")
    folder = find_checkpoint(llama)
    assert (tmp_path / "process") in folder.parents and read_config(folder).family == "llama"


def test_every_cut_of_a_file_is_refused(llama: Path, tmp_path: Path) -> None:
    data, path = llama.read_bytes(), tmp_path / "cut.gguf"
    ends = [*range(0, 24), *range(24, len(data), len(data) // 40), len(data) - 1]
    for end in ends:
        path.write_bytes(data[:end])
        with pytest.raises(ModelError):
            find_checkpoint(path)


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (4, struct.pack("<I", 99), "version 99"),
        (8, struct.pack("<Q", 1 << 60), "tensors, and a model has"),
        (16, struct.pack("<Q", 1 << 60), "metadata fields"),
        (24, struct.pack("<Q", 1 << 62), "a string of"),
        (0, b"GGML", "does not begin with GGUF"),
    ],
)
def test_hostile_counts_are_refused_at_once(
    llama: Path, tmp_path: Path, offset: int, value: bytes, words: str
) -> None:
    data = bytearray(llama.read_bytes())
    data[offset : offset + len(value)] = value
    (tmp_path / "hostile.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=words):
        find_checkpoint(tmp_path / "hostile.gguf")


def test_a_tensor_without_values_is_refused(tmp_path: Path) -> None:
    head = struct.pack("<4sIQQQ", b"GGUF", 3, 1, 0, 1) + b"t"
    head += struct.pack("<IQQQIQ", 3, 256, 0, 1 << 40, 0, 0)
    (tmp_path / "a.gguf").write_bytes(head + bytes(64))
    with pytest.raises(CorruptCheckpoint, match="a dim of 0"):
        read_container(tmp_path / "a.gguf")


def test_an_array_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    head = (
        struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 10, 7_000_000)
    )
    (tmp_path / "a.gguf").write_bytes(head)
    with pytest.raises(CorruptCheckpoint, match="needs 56000000 more"):
        read_container(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("field", "error", "words"),
    [
        ("llama.block_count", CorruptCheckpoint, "lacks the field llama.block_count"),
        ("general.architecture", CorruptCheckpoint, "lacks the field general.architecture"),
        ("tokenizer.ggml.tokens", CorruptCheckpoint, "lacks the field tokenizer.ggml.tokens"),
    ],
)
def test_a_missing_field_is_named(
    llama: Path, tmp_path: Path, field: str, error: type[ModelError], words: str
) -> None:
    name = field.encode()
    data = llama.read_bytes().replace(name, b"x" * len(name))
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(error, match=words):
        find_checkpoint(tmp_path / "model.gguf")


def test_an_unknown_architecture_and_pre_tokenizer_are_named(llama: Path, tmp_path: Path) -> None:
    for old, new, words in (
        (b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", "'mamba' is not supported"),
        (b"llama-bpe", b"llama-bpx", "'llama-bpx' is not supported"),
    ):
        (tmp_path / "model.gguf").write_bytes(llama.read_bytes().replace(old, new, 1))
        with pytest.raises(UnsupportedModel, match=words):
            find_checkpoint(tmp_path / "model.gguf")


def test_a_folder_stands_for_its_only_model(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(llama.read_bytes())
    assert read_config(find_checkpoint(folder)).family == "llama"
    (folder / "b.gguf").write_bytes(llama.read_bytes())
    with pytest.raises(CheckpointNotFound, match="holds 2 GGUF models"):
        find_checkpoint(folder)
