"""The laws of the design, held against any checkpoint on the user's own machine and device.

What answers is the real engine, with its operators, on the checkpoint's own weights and RoPE law.
What it answers to is the definition: plain dense passes in a wider dtype. How far it may be off
comes from the data: twice the error of the same dense passes in the engine's own dtype.
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
