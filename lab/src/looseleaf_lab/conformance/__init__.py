"""The laws of the design, checked on any checkpoint, on the user's machine and device.

The real engine answers, with its operators, the checkpoint's weights and RoPE law. Plain dense
passes in a wider dtype are the truth. Twice the error of the same passes in the engine's own dtype
is the budget.
"""

from looseleaf_lab.conformance.answers import Answers
from looseleaf_lab.conformance.check import LAWS, Law, check_laws
from looseleaf_lab.conformance.subject import Subject, describe_subject
from looseleaf_lab.conformance.verdict import Finding, LawVerdict, Verdict

__all__ = [
    "LAWS",
    "Answers",
    "Finding",
    "Law",
    "LawVerdict",
    "Subject",
    "Verdict",
    "check_laws",
    "describe_subject",
]
