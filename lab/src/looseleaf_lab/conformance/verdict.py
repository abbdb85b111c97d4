"""Results of the laws: findings with error and budget, verdicts, and one page of text."""

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
    """One comparison: its label, its error, and the error that is allowed.

    ``budget`` is twice the error of plain dense passes in the same dtype, plus a rounding step.
    Merged states add the rounding of their log-sum-exps. Error and budget are largest values or
    root mean squares, whichever uses more of its budget.
    """

    label: str
    error: float
    budget: float

    @property
    def holds(self) -> bool:
        """Whether the error is within the budget; False for NaN."""
        return self.error <= self.budget

    @property
    def share(self) -> float:
        """Error over budget."""
        if not math.isfinite(self.error):
            return math.inf
        return self.error / self.budget if self.budget else (0.0 if self.error == 0 else math.inf)

    def __str__(self) -> str:
        return f"{self.label}: {self.error:.2e} of {self.budget:.2e}"


@dataclass(frozen=True)
class Comparison:
    """The engine's values, the true ones, and samples of plain passes.

    ``actual`` and ``truth`` have the same shape; ``plain`` has a leading dimension of samples.
    ``lse`` is the largest log-sum-exp of the rows of a merged state (fp32)."""

    label: str
    actual: Tensor
    truth: Tensor
    plain: Tensor
    dtype: torch.dtype
    lse: float = 0.0

    def finding(self) -> Finding:
        """The engine's error against the truth."""
        return self._finding(self.label, self.actual.double() - self.truth)

    def against(self, label: str, other: Tensor) -> Finding:
        """The difference of ``other`` from the engine's values, in the same budget."""
        return self._finding(label, other.double() - self.actual.double())

    def _finding(self, label: str, difference: Tensor) -> Finding:
        """The worse of two measures: the largest value shows one wrong key, the root mean square
        a small error everywhere."""
        error = self.plain.double() - self.truth
        step = torch.finfo(self.dtype).eps + torch.finfo(torch.float32).eps * self.lse
        return max(
            (
                Finding(label, size(difference), 2 * size(error) + step * size(self.truth))
                for size in (largest, root_mean_square)
            ),
            key=lambda finding: finding.share,
        )


@dataclass(frozen=True)
class LawVerdict:
    """One law's number, sentence, status, findings and reason."""

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
    """All laws on one model, device and dtype, which ``subject`` describes."""

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
        counted = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        if self.failed:
            numbers = " and ".join(str(law.number) for law in self.failed)
            return f"does not conform: law {numbers} failed ({counted})"
        return f"conforms, as far as it was checked ({counted})"

    def page(self) -> str:
        """The verdict as text of one page."""
        lines = [textwrap.fill(" · ".join(self.subject.values()), _WIDTH), ""]
        for law in self.laws:
            status = "FAILED" if law.status == "failed" else law.status
            lines.append(_indent(law.sentence, f"law {law.number}  {status}"))
            lines += [_indent(text) for text in _details(law)]
        return "\n".join([*lines, "", self.sentence])

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain data; non-finite numbers become None."""
        return {
            "subject": dict(self.subject),
            "conforms": not self.failed,
            "laws": [_plain_data(law) for law in self.laws],
        }


def largest(x: Tensor) -> float:
    """The largest absolute value; 0 for no elements, infinite for NaN."""
    if not x.numel():
        return 0.0
    value = float(x.abs().max())
    return value if math.isfinite(value) else math.inf


def root_mean_square(x: Tensor) -> float:
    """The root mean square; 0 for no elements, infinite for NaN."""
    if not x.numel():
        return 0.0
    value = float(x.double().square().mean().sqrt())
    return value if math.isfinite(value) else math.inf


def _details(law: LawVerdict) -> list[str]:
    if law.status == "skipped":
        return [law.reason]
    lines = [law.reason] if law.reason else []
    if law.status == "failed":
        return lines + [str(finding) for finding in law.findings if not finding.holds]
    compared = "; ".join(finding.label for finding in law.findings)
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
            "what": f.label,
            "error": f.error if math.isfinite(f.error) else None,
            "budget": f.budget if math.isfinite(f.budget) else None,
            "holds": f.holds,
        }
        for f in law.findings
    ]
    return data
