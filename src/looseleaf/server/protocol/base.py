"""What all bodies have in common."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A body whose fields are all known and of the right type; numbers are finite."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )
