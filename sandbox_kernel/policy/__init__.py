"""What an administrator allows: policy files, and the judgement of requests by them (A1, B5, C5).

Each policy file is judged by itself, and a request must pass all of them. So a further file can
only take away: what several files allow is what each of them allows. Nothing is looked up on
an engine here, and nothing of Jupyter is known; `sandbox_kernel.config` says where files lie.
"""

from sandbox_kernel.policy.document import Cap, Consent, MountGrant, PolicyDocument, parse_policy
from sandbox_kernel.policy.files import POLICY_NAME, load_policy
from sandbox_kernel.policy.judgement import Decision, Filled, Owner, Policy, Quota
from sandbox_kernel.policy.mounts import HostFolder, host_folder
from sandbox_kernel.policy.patterns import EngineRule, check_engine
from sandbox_kernel.policy.summary import Statement, statements

__all__ = [
    "POLICY_NAME",
    "Cap",
    "Consent",
    "Decision",
    "EngineRule",
    "Filled",
    "HostFolder",
    "MountGrant",
    "Owner",
    "Policy",
    "PolicyDocument",
    "Quota",
    "Statement",
    "check_engine",
    "host_folder",
    "load_policy",
    "parse_policy",
    "statements",
]
