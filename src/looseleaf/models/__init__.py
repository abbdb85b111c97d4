"""Decoders as plain definitions, their weights and their tokenizers. Knows no policy.

A model calls the attention object that the runner gives it, with unrotated queries and keys, and
offers one hook between layers.
"""

from looseleaf.models.config_reader import read_config
from looseleaf.models.decoder import Decoder
from looseleaf.models.fingerprint import model_fingerprint
from looseleaf.models.generation import names_of_advice, read_advice
from looseleaf.models.hub import find_checkpoint
from looseleaf.models.tokenizer import Tokenizer
from looseleaf.models.weights import load_weights

__all__ = [
    "Decoder",
    "Tokenizer",
    "find_checkpoint",
    "load_weights",
    "model_fingerprint",
    "names_of_advice",
    "read_advice",
    "read_config",
]
