"""The losslessness laboratory: prove a policy exact, or show the leak.

Four ways, from proof to production:

* `certify`: a proof from the policy's code, by static dependence analysis at its real shapes;
* `check_non_anticipating`: a search for a decision that moves with what it must not know, with a shrunk witness;
* `exact_output_law`: the law of the emitted tokens by enumeration, for tabular models, in float64;
* `sequence_test` and `lossless_monitor`: a chi-square test of a running decoder, and an anytime-valid alarm in it.

A `Scheme` describes how drafts are drawn and tested, faults included; `CATALOGUE` holds what published systems do.
"""

from specav.lossless.anticipation import Finding, Witness, check_non_anticipating
from specav.lossless.catalogue import CATALOGUE, Practice
from specav.lossless.certify import Certificate, certify
from specav.lossless.exact import Bias, OutputLaw, estimated_paths, exact_output_law, largest_bias, total_variation
from specav.lossless.jaxpr_dependence import Dependence, dependence, input_dependence
from specav.lossless.monitor import LosslessMonitor, MonitorState, lossless_monitor, round_evidence
from specav.lossless.scheme import Scheme, one_token_law, sampled_with, scheme_fault
from specav.lossless.statistical import LawTest, sequence_counts, sequence_test
from specav.lossless.tabular import markov_model, table_family

__all__ = [
    "CATALOGUE",
    "Bias",
    "Certificate",
    "Dependence",
    "Finding",
    "LawTest",
    "LosslessMonitor",
    "MonitorState",
    "OutputLaw",
    "Practice",
    "Scheme",
    "Witness",
    "certify",
    "check_non_anticipating",
    "dependence",
    "estimated_paths",
    "exact_output_law",
    "input_dependence",
    "largest_bias",
    "lossless_monitor",
    "markov_model",
    "one_token_law",
    "round_evidence",
    "sampled_with",
    "scheme_fault",
    "sequence_counts",
    "sequence_test",
    "table_family",
    "total_variation",
]
