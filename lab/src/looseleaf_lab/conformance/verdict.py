"""What came of the laws: findings with error and budget, and one page that says it all."""

import math
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Status = Literal["passed", "failed", "skipped"]
_WIDTH, _INDENT = 96, 16


@dataclass(frozen=True)
class Finding:
    """One comparison: what was compared, how far it is off, and how far it may be.

    ``budget`` is twice the error of the plain dense passes in the same dtype, and a rounding step;
    where states are merged, also the rounding of their log-sum-exps, which weigh them. Both are of
    the largest values or of root mean squares, whichever leaves less of the budget.
    """

    what: str
    error: float
    budget: float

    @property
    def holds(self) -> bool:
        """Whether the error is within the budget; one that is no number is not."""
        return self.error <= self.budget

    @property
    def share(self) -> float:
        """Error over budget."""
        if not math.isfinite(self.error):
            return math.inf
        return self.error / self.budget if self.budget else (0.0 if self.error == 0 else math.inf)

    def __str__(self) -> str:
        return f"{self.what}: {self.error:.2e} of {self.budget:.2e}"


@dataclass(frozen=True)
class Judged:
    """What the engine says, what is true, and samples of what plain passes say.

    ``actual`` and ``truth`` have one shape, ``plain`` a leading dimension of samples. ``lse`` is
    the largest log-sum-exp of the rows: states of one layer carry theirs in fp32."""

    what: str
    actual: Tensor
    truth: Tensor
    plain: Tensor
    dtype: torch.dtype
    lse: float = 0.0

    def finding(self) -> Finding:
        """How far the engine is from the truth."""
        return self._finding(self.what, self.actual.double() - self.truth)

    def against(self, what: str, other: Tensor) -> Finding:
        """How far ``other`` is from the engine's answer, in the same budget."""
        return self._finding(what, other.double() - self.actual.double())

    def _finding(self, what: str, difference: Tensor) -> Finding:
        """By the largest value, which one wrong key shows in, or by the root mean square, which a
        little wrong everywhere does."""
        error = self.plain.double() - self.truth
        step = torch.finfo(self.dtype).eps + torch.finfo(torch.float32).eps * self.lse
        return max(
            (
                Finding(what, size(difference), 2 * size(error) + step * size(self.truth))
                for size in (largest, root_mean_square)
            ),
            key=lambda finding: finding.share,
        )


@dataclass(frozen=True)
class LawVerdict:
    """One law: its number and sentence, what became of it, and why."""

    number: int
    sentence: str
    status: Status
    findings: tuple[Finding, ...] = ()
    reason: str = ""
    seconds: float = 0.0

    @property
    def worst(self) -> Finding | None:
        """The finding with the largest share of its budget."""
        return max(self.findings, key=lambda finding: finding.share, default=None)


@dataclass(frozen=True)
class Verdict:
    """All laws on one model, device and dtype; ``subject`` says which, by name."""

    subject: Mapping[str, str]
    laws: tuple[LawVerdict, ...]

    @property
    def failed(self) -> tuple[LawVerdict, ...]:
        return tuple(law for law in self.laws if law.status == "failed")

    @property
    def sentence(self) -> str:
        """The verdict in one line."""
        counts = {
            status: sum(law.status == status for law in self.laws)
            for status in ("passed", "failed", "skipped")
        }
        told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        if self.failed:
            numbers = " and ".join(str(law.number) for law in self.failed)
            return f"does not conform: law {numbers} failed ({told})"
        return f"conforms, as far as it was checked ({told})"

    def page(self) -> str:
        """One page of text."""
        lines = [textwrap.fill(" · ".join(self.subject.values()), _WIDTH), ""]
        for law in self.laws:
            status = "FAILED" if law.status == "failed" else law.status
            lines.append(_indent(law.sentence, f"law {law.number}  {status}"))
            lines += [_indent(text) for text in _details(law)]
        return "\n".join([*lines, "", self.sentence])

    def to_json(self) -> dict[str, Any]:
        """The same as plain data; a number that is not finite becomes None."""
        return {
            "subject": dict(self.subject),
            "conforms": not self.failed,
            "laws": [_plain_data(law) for law in self.laws],
        }


def largest(x: Tensor) -> float:
    """The largest absolute value, infinite where something is no number."""
    if not x.numel():
        return 0.0
    value = float(x.abs().max())
    return value if math.isfinite(value) else math.inf


def root_mean_square(x: Tensor) -> float:
    """The root mean square, infinite where something is no number."""
    if not x.numel():
        return 0.0
    value = float(x.double().square().mean().sqrt())
    return value if math.isfinite(value) else math.inf


def _details(law: LawVerdict) -> list[str]:
    if law.status == "skipped":
        return [law.reason]
    told = [law.reason] if law.reason else []
    if law.status == "failed":
        return told + [str(finding) for finding in law.findings if not finding.holds]
    compared = "; ".join(finding.what for finding in law.findings)
    worst = law.worst
    assert worst is not None
    return [f"compared: {compared}", f"worst: {worst} ({worst.share:.0%})"]


def _indent(text: str, head: str = "") -> str:
    pad = " " * _INDENT
    return textwrap.fill(text, _WIDTH, initial_indent=head.ljust(_INDENT), subsequent_indent=pad)


def _plain_data(law: LawVerdict) -> dict[str, Any]:
    data = asdict(law)
    data["findings"] = [
        {
            "what": f.what,
            "error": f.error if math.isfinite(f.error) else None,
            "budget": f.budget if math.isfinite(f.budget) else None,
            "holds": f.holds,
        }
        for f in law.findings
    ]
    return data
