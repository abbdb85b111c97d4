"""Writes a tiny checkpoint whose answers are known: ``python tests/clients/scripted.py FOLDER``.

Its next token depends on the last token only. So an answer is a chain of words, a call begins if
the prompt ends with the marker of a caller, and text under a grammar is as short as possible.
"""

import itertools
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WIDTH = 512
"""Size of the vocabulary and of the hidden state, in which each token has its own direction."""

SPECIAL = (
    *("<|begin|>", "<|end|>", "<|system|>", "<|user|>"),
    *("<|assistant|>", "<|tool|>", "<|caller|>"),
)
ANSWER = ("The", " archive", " is", " in", " the", " north", " wing", ".")
THOUGHT = ("Let", " me", " see", "!")
CHAINS = (
    ("<|assistant|>", *ANSWER, "<|end|>"),
    ("<think>", *THOUGHT, "</think>", ANSWER[0]),
    ("<|caller|>", "<tool_call>"),
    ("</tool_call>", "<|end|>"),
)
WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", *THOUGHT, *ANSWER)

# what ends a JSON value is likelier than what makes it longer
TERSE = '"}],:{1204abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_-+.356789['
CHAIN_LOGIT, FIRST_LOGIT, STEP = 20.0, 7.0, 0.05

TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>"
    "{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['reasoning_content'] %}<think>{{ message['reasoning_content'] }}</think>"
    "{% endif %}"
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}{% if tools and messages[-1]['role'] != 'tool' %}<|caller|>"
    "{% else %}<|assistant|>{% if enable_thinking %}<think>{% endif %}{% endif %}{% endif %}"
)


def write_checkpoint(folder: Path) -> None:
    """The checkpoint, with the tokenizer and the configuration of a Llama of one layer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": WIDTH,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.token_to_id("<|begin|>"),
        "eos_token_id": tokenizer.token_to_id("<|end|>"),
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(_weights(tokenizer), folder / "model.safetensors")


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return tokenizer


def _weights(tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    """Weights whose layer adds nothing, so that logits are a row of a table by the last token."""
    table = torch.full((WIDTH, WIDTH), -5.0)
    for rank, character in enumerate(TERSE):
        table[_id(tokenizer, character)] = FIRST_LOGIT - STEP * rank
    # the closing tag is one token, as pretrained models write it; a string ends before it
    table[_id(tokenizer, "</tool_call>")] = FIRST_LOGIT - STEP / 2
    for chain in CHAINS:
        for last, following in itertools.pairwise(chain):
            table[_id(tokenizer, following), _id(tokenizer, last)] = CHAIN_LOGIT
    layer = "model.layers.0"
    zeros, ones = torch.zeros(WIDTH, WIDTH), torch.ones(WIDTH)
    return {
        "model.embed_tokens.weight": torch.eye(WIDTH),
        # a norm scales a one-hot vector by the root of its width
        "lm_head.weight": table / WIDTH**0.5,
        "model.norm.weight": ones,
        f"{layer}.input_layernorm.weight": ones.clone(),
        f"{layer}.post_attention_layernorm.weight": ones.clone(),
        **{f"{layer}.self_attn.{name}_proj.weight": zeros.clone() for name in "qkvo"},
        **{f"{layer}.mlp.{name}_proj.weight": torch.zeros(64, WIDTH) for name in ("gate", "up")},
        f"{layer}.mlp.down_proj.weight": torch.zeros(WIDTH, 64),
    }


def _id(tokenizer: Tokenizer, text: str) -> int:
    token = tokenizer.token_to_id(text)
    assert token is not None, text
    return int(token)


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]))
