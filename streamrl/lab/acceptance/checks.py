"""The table of all checks, in the order in which they run: what is cheap and decides everything comes first."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.config.file import ConfigError
from streamrl.lab.acceptance.check import Check

SHORT, RUN = 180.0, 900.0  # seconds: a few imports; a run, in which servers compile their kernels first

# Of the quickstart's runs, one with each interruption: the transport that each publishes by.
TRANSPORT_OF = {"retract": "broadcast", "in_place": "memory", "drain": "disk", "abort": "delta"}
FIRST, RESUMED, MEASURED = "quickstart.retract", "quickstart.in_place", "logprobs.gap"

PACKAGE = "streamrl.lab.acceptance"


def _check(name: str, what: str, run: str, deadline: float, *arguments: str, after: str = "") -> Check:
    """`run` is MODULE:FUNCTION of this package."""
    return Check(name, what, f"{PACKAGE}.{run}", deadline, arguments, after)


CHECKS: tuple[Check, ...] = (
    _check("installed.environment", "versions and requirements", "installed:environment", SHORT),
    _check("installed.imports", "what a run imports, Transformer Engine too", "installed:imports", SHORT),
    _check("machine.limits", "/dev/shm, ulimit -n and -l", "installed:limits", SHORT),
    _check("machine.devices", "every GPU computes, the device map", "installed:devices", SHORT),
    _check("layers.engine", "Transformer Engine's layers against torch", "engine:run", SHORT),
    *(
        _check(f"quickstart.{kind}", f"a run with {kind}, a kill and the audit", "quickstart:run", RUN, kind)
        for kind in TRANSPORT_OF
    ),
    _check("machine.nccl", "the same NCCL variables at both ends", "installed:nccl", SHORT, after=FIRST),
    _check("logprobs.gap", "the learner's log-probs against the server's", "quickstart:logprobs", RUN, after=FIRST),
    *(
        _check(f"publish.{name}", "into a server in use, idle, after a kill", "quickstart:publish", SHORT, kind,
               after=f"quickstart.{kind}")
        for kind, name in TRANSPORT_OF.items()
    ),
    _check("checkpoint.resume", "a killed learner comes back", "quickstart:resume", SHORT, after=RESUMED),
    _check("checkpoint.reshard", "a run goes on in another layout", "quickstart:reshard", RUN, after=RESUMED),
    _check("layers.local", "local layers against Transformer Engine's", "layouts:local", RUN, after=MEASURED),
    *(
        _check(f"layout.{name}", "the learner on two ranks against one", "layouts:run", RUN, name, after=MEASURED)
        for name in ("dp2", "tp2", "pp2", "cp2", "fsdp2")
    ),
    _check("experts.run", "a run of a mixture of experts, audited", "layouts:experts", RUN),
    _check("layout.ep2", "expert parallelism against one rank", "layouts:run", RUN, "ep2", after="experts.run"),
    *(
        _check(f"server.{name}", "a server's log-probs against the learner's", "servers:run", RUN, name)
        for name in ("tp2", "ep2", "dp_attention", "ngram", "fp8")
    ),
    _check("delivery.small", "a batch of 5 million tokens", "delivery:run", SHORT, "small"),
    _check("delivery.large", "a batch of 40 million tokens", "delivery:run", RUN, "large"),
)  # fmt: skip


def chosen(names: Sequence[str]) -> tuple[Check, ...]:
    """Checks by name or group, with those that they look at; all without names. Raises ConfigError."""
    groups = dict.fromkeys(check.group for check in CHECKS)
    for name in names:
        if name not in groups and name not in {check.name for check in CHECKS}:
            allowed = ", ".join([*groups, *(check.name for check in CHECKS)])
            raise ConfigError(f"--only: {name} is no check; allowed: {allowed}")
    wanted = {check.name for check in CHECKS if not names or check.name in names or check.group in names}
    for check in reversed(CHECKS):  # what a check looks at comes before it
        if check.name in wanted and check.after:
            wanted.add(check.after)
    return tuple(check for check in CHECKS if check.name in wanted)
