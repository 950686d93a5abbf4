"""The generator workers, their SGLang servers, and how a token is drawn."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from streamrl.config.section import Section


class SamplingConfig(Section):
    """How a token is drawn. The learner divides its logits by the same temperature."""

    temperature: float = Field(1.0, gt=0, description="softmax temperature")
    max_new_tokens: int = Field(16, ge=1, description="tokens after which an answer is cut")
    top_p: float = Field(
        1.0, ge=1, le=1, description="truncated sampling changes the behaviour policy's support: refused"
    )
    top_k: int = Field(
        -1, ge=-1, le=-1, description="truncated sampling changes the behaviour policy's support: refused"
    )


class GenerateConfig(Section):
    """The generator workers and their SGLang servers."""

    workers: int = Field(1, ge=1, description="generator workers, one SGLang server each")
    attach: tuple[str, ...] = Field(
        (), description="addresses (http://host:port) of running servers; empty: start own ones"
    )
    group_size: int = Field(8, ge=1, description="G, samples of one prompt")
    groups_in_flight: int = Field(32, ge=1, description="groups that a worker generates at once")
    single_requests: bool = Field(False, description="one request a sample (long answers) instead of one with n = G")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="how tokens are drawn")
    request_timeout: float = Field(600.0, gt=0, description="seconds that one request to a server may take")
    tensor_parallel: int = Field(1, ge=1, description="tensor-parallel size of a server")
    server_args: dict[str, Any] = Field(default_factory=dict, description="further SGLang arguments, passed untouched")
    threads: int = Field(1, ge=1, description="CPU threads of a server (OMP_NUM_THREADS)")
    heartbeat: float = Field(1.0, gt=0, description="seconds between heartbeats of a worker")
    restarts: int = Field(
        3, ge=0, description="times that a worker which had been ready is started again after it died"
    )
    probes: int = Field(3, ge=0, description="held-out prompts answered greedily at the start and at the end")

    @model_validator(mode="after")
    def _runs_no_code_of_a_model_folder(self) -> GenerateConfig:
        if any(name.replace("-", "_") == "trust_remote_code" for name in self.server_args):
            raise ValueError("server_args: trust_remote_code would run code from a model folder; allowed: other names")
        return self
