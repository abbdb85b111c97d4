"""The policy file of a model, as `looseleaf calibrate` writes it: its blending policy, its primer
and its anchor layers.

A policy is calibrated for one model: its best layer and share differ between models. So the file
names the shape of its model, and other models refuse it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from looseleaf.config.fuse import Fuse
from looseleaf.config.model import ModelConfig
from looseleaf.config.option import require
from looseleaf.config.select import Select
from looseleaf.errors import InvalidOption

_FORM = 1
_SHAPE = ("family", "num_layers", "hidden_size", "vocab_size")


@dataclass(frozen=True)
class PolicyFile:
    """``fuse`` for requests of a model of ``shape`` that name no blending policy, None for plain
    reuse. Documents are computed behind the texts of the ``primer``. ``anchors`` are for requests
    with a selection that names none; None if every layer chooses.

    ``measured`` has the figures of the calibration, for readers."""

    shape: dict[str, Any]
    fuse: Fuse | None
    primer: tuple[str, ...] = ()
    measured: dict[str, Any] = field(default_factory=dict)
    anchors: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        fuse: Fuse | None,
        primer: tuple[str, ...] = (),
        measured: dict[str, Any] | None = None,
        anchors: tuple[int, ...] | None = None,
    ) -> "PolicyFile":
        """The policy of a model, with the figures of its calibration."""
        shape = {name: getattr(model, name) for name in _SHAPE}
        return cls(shape, fuse, primer, measured or {}, anchors)

    @classmethod
    def read(cls, path: str | Path) -> "PolicyFile":
        """The policy in a file. Raises InvalidOption for a file of another form."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidOption(f"policy {path} can't be read: {error}", "policy") from error
        fits = isinstance(content, dict) and content.get("form") == _FORM
        names = "model", "fuse", "primer", "anchors"
        shape, settings, primer, anchors = (
            [content.get(name) for name in names] if fits else [None] * 4
        )
        if not (
            isinstance(shape, dict)
            and isinstance(settings, dict)
            and isinstance(primer, list)
            and all(isinstance(text, str) and text.strip() for text in primer)
            and isinstance(anchors, list | None)
        ):
            raise InvalidOption(
                f"policy {path} is no policy file of this version: write one with looseleaf "
                "calibrate",
                "policy",
            )
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
        try:
            fuse = Fuse(**settings)
            anchors = None if anchors is None else Select("quest", anchors=tuple(anchors)).anchors
        except (InvalidOption, TypeError, KeyError) as error:
            raise InvalidOption(f"policy {path}: {error}", "policy") from error
        chosen = None if fuse.selector == "none" else fuse
        return cls(shape, chosen, tuple(primer), content.get("measured", {}), anchors)

    def write(self, path: str | Path) -> None:
        """Write the file. Raises InvalidOption if that fails."""
        content = {
            "form": _FORM,
            "model": self.shape,
            "fuse": (self.fuse or Fuse()).settings(),
            "primer": list(self.primer),
            "measured": self.measured,
            **({} if self.anchors is None else {"anchors": list(self.anchors)}),
        }
        try:
            Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidOption(f"policy {path} can't be written: {error}", "policy") from error

    def require_model(self, model: ModelConfig) -> None:
        """Raise InvalidOption unless ``model`` has the shape that the policy is for."""
        for name in _SHAPE:
            own, other = getattr(model, name), self.shape.get(name)
            require(
                own == other,
                f"policy is for a model with {name} {other!r}, and this model has {own!r}: run "
                "looseleaf calibrate on this model",
                "policy",
            )
        last = max(self.anchors or (0,))
        require(
            last < model.num_layers,
            f"policy has anchor {last}, and the model has layers 0 to {model.num_layers - 1}: run "
            "looseleaf calibrate on this model",
            "policy",
        )
