"""Model definitions, their weights and their tokenizers. This folder knows no policy.

A model passes unrotated queries and keys to the runner's attention object. It calls one hook
between layers.
"""

from looseleaf.models.checkpoint.fingerprint import model_fingerprint
from looseleaf.models.checkpoint.hub import find_checkpoint
from looseleaf.models.checkpoint.weights import load_weights
from looseleaf.models.config.config_reader import read_config
from looseleaf.models.config.generation import names_of_advice, read_advice
from looseleaf.models.decoder import Decoder
from looseleaf.models.tokenizer.tokenizer import Tokenizer

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
