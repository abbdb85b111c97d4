"""The name of a model for clients."""

from pathlib import Path

from looseleaf.config import ServerConfig

REFERENCE_NAME = "looseleaf-reference"


def base_name(model: str | None, config: ServerConfig) -> str:
    """The name of the model on the command line: an option, or the name of its checkpoint."""
    if config.served_model_name:
        return config.served_model_name
    if model is None:
        return REFERENCE_NAME
    folder = Path(model)
    return folder.resolve().name if folder.exists() else model
