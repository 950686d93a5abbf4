"""The Kubernetes manifests: strict by their own rules, and valid by the published schemas where those are installed."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamrl.config.file import ConfigError

# What jobset.x-k8s.io/v1alpha2 knows of what is used here: kubernetes-sigs/jobset, config/components/crd/bases.
JOBSET = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"network", "successPolicy", "failurePolicy", "replicatedJobs"},
    "spec.network": {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"},
    "spec.successPolicy": {"operator", "targetReplicatedJobs"},
    "spec.failurePolicy": {"maxRestarts", "rules"},
}

REPLICATED_JOB = {"name", "replicas", "template"}


@pytest.fixture(params=["jobset", "jobs"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _documents(launch: Any, kind: str, nodes: int, **kubernetes: Any) -> list[dict[str, Any]]:
    made = launch("kubernetes", nodes, kubernetes={"kind": kind, "queue": "training", "keys": "keys", **kubernetes})
    return list(yaml.safe_load_all(made.files()["run.yaml"]))


def _jobs(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The spec of each role's Job."""
    jobset = [document for document in documents if document["kind"] == "JobSet"]
    if jobset:
        return {job["name"]: job["template"]["spec"] for job in jobset[0]["spec"]["replicatedJobs"]}
    jobs = [document for document in documents if document["kind"] == "Job"]
    return {job["metadata"]["name"].removeprefix("trial-"): job["spec"] for job in jobs}


@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_every_role_has_its_pods_and_gpus(launch, kind, nodes):
    jobs = _jobs(_documents(launch, kind, nodes))
    learners = max(1, nodes // 2)
    assert {name: job["completions"] for name, job in jobs.items()} == {
        "replay": 1,
        "learner": learners,
        "generator": 2 * learners,
    }
    gpus = {
        name: job["template"]["spec"]["containers"][0].get("resources", {}).get("limits", {})
        for name, job in jobs.items()
    }
    assert gpus == {"replay": {}, "learner": {"nvidia.com/gpu": 4}, "generator": {"nvidia.com/gpu": 2}}


@pytest.mark.parametrize(
    ("gpus", "workers", "asked"),
    [(8, 2, {"nvidia.com/gpu": 2, "cpu": 16, "memory": "128000Mi"}), (0, 3, {"cpu": 21, "memory": "341333Mi"})],
)
def test_a_generator_s_pod_asks_for_its_share_of_a_node(launch, kind, gpus, workers, asked):
    config = {"model": {"path": "/m"}, "run": {"name": "trial"}, "generate": {"workers": workers, "tensor_parallel": 2}}
    node = {"gpus": gpus, "memory": "500Gi"}
    roles = {"learner": node | {"nodes": 1, "cpus": 64}, "generators": node | {"nodes": 2, "cpus": 64 if gpus else 32}}
    made = launch("kubernetes", 3, config=config, **roles, kubernetes={"kind": kind})
    jobs = _jobs(list(yaml.safe_load_all(made.files()["run.yaml"])))
    generator, learner = (
        jobs[name]["template"]["spec"]["containers"][0]["resources"]["limits"] for name in ("generator", "learner")
    )
    assert generator == asked
    assert learner.items() >= {"cpu": 64, "memory": "512000Mi"}.items()


def test_the_address_and_the_rendezvous_are_names_of_pods(launch, kind):
    documents = _documents(launch, kind, 8)
    config = yaml.safe_load(documents[0]["data"]["config.yaml"])
    number = "0-0" if kind == "jobset" else "0"
    assert config["replay"]["address"] == "tcp://0.0.0.0:7100"
    assert config["replay"]["host"] == f"trial-replay-{number}.trial"
    learner = _jobs(documents)["learner"]["template"]["spec"]
    assert f"--rdzv-endpoint=trial-learner-{number}.trial:29400" in learner["containers"][0]["args"][0]
    if kind == "jobs":  # a JobSet's controller makes the service and the subdomain
        service = next(document for document in documents if document["kind"] == "Service")
        assert learner["subdomain"] == service["metadata"]["name"] == "trial"
        assert service["spec"]["clusterIP"] == "None"
        pods = _jobs(documents)["replay"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= pods.items()


def test_a_pod_that_is_told_to_end_has_its_time_and_comes_back(launch, kind):
    for job in _jobs(_documents(launch, kind, 2)).values():
        pod = job["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > 120
        assert pod["restartPolicy"] == "Never"  # podFailurePolicy asks for it
        words = shlex.split(pod["containers"][0]["args"][0])
        assert words[:5] == ["exec", "python", "-m", "streamrl.launch.role", "--run-folder"]
        rules = {
            rule["action"] + str(rule.get("onExitCodes", {}).get("values", ""))
            for rule in job["podFailurePolicy"]["rules"]
        }
        assert rules == {"FailJob[2]", "Ignore[75]", "Ignore"}


def test_a_configuration_that_is_refused_before_a_role_starts_ends_the_job_that_prepares_the_run(launch, kind):
    """The others only wait for it, and may do so in vain more than once."""
    refusing = {
        (name, rule["onExitCodes"]["containerName"])
        for name, job in _jobs(_documents(launch, kind, 2)).items()
        for rule in job["podFailurePolicy"]["rules"]
        if rule["action"] == "FailJob"
    }
    assert refusing == {("replay", "folder"), ("replay", "role"), ("learner", "role"), ("generator", "role")}


def test_what_prepares_a_run_has_the_variables_of_its_roles(launch, kind):
    made = launch("kubernetes", 2, environment={"PYTHONPATH": "/shared/code"}, kubernetes={"kind": kind, "secret": "s"})
    for job in _jobs(list(yaml.safe_load_all(made.files()["run.yaml"]))).values():
        (folder,), (role,) = (job["template"]["spec"][key] for key in ("initContainers", "containers"))
        assert {"name": "PYTHONPATH", "value": "/shared/code"} in folder["env"]
        assert (folder["env"], folder["envFrom"]) == (role["env"], role["envFrom"])


def test_keys_come_from_a_secret_that_the_image_s_user_can_read_and_nobody_else(launch, kind):
    documents = _documents(launch, kind, 2, secret="wandb")
    assert yaml.safe_load(documents[0]["data"]["config.yaml"])["stream"]["keys"] == "/etc/streamrl/keys"
    for job in _jobs(documents).values():
        pod = job["template"]["spec"]
        keys = next(volume for volume in pod["volumes"] if volume["name"] == "keys")
        assert keys["secret"] == {"secretName": "keys", "defaultMode": 0o440}  # root's, of the group below
        assert f"--uid {pod['securityContext']['fsGroup']} " in Path("launch/Dockerfile.gpu").read_text()
        assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "wandb"}}]
        mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_queue_is_a_label_of_what_is_queued(launch, kind):
    documents = _documents(launch, kind, 2)
    queued = [one for one in documents if one["kind"] in ("Job", "JobSet")]
    assert queued
    assert all(one["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training" for one in queued)


def test_pods_with_gpus_have_network_cards_locked_memory_and_their_nodes_network_where_that_is_asked_for(launch, kind):
    """Rendered alone: no such pod has run."""
    plain = _jobs(_documents(launch, kind, 2))
    asked = _jobs(_documents(launch, kind, 2, rdma={"rdma/hca_shared_devices": 2}, ipc_lock=True, host_network=True))
    for name, job in asked.items():
        former, pod = plain[name]["template"]["spec"], job["template"]["spec"]
        (container,) = pod["containers"]
        assert "hostNetwork" not in former
        assert former["containers"][0]["securityContext"] == {"allowPrivilegeEscalation": False}
        if name == "replay":
            assert pod == former
            continue
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]
        assert resources["limits"].items() > former["containers"][0]["resources"]["limits"].items()
        assert resources["limits"]["rdma/hca_shared_devices"] == 2
        assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}
        assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")


@pytest.mark.parametrize("rdma", [{"rdma/hca": 0}, {"hca": 1}])
def test_what_is_no_network_card_is_refused(launch, rdma):
    with pytest.raises(ConfigError, match=r"kubernetes\.rdma: .* allowed: such as rdma/hca_shared_devices: 1"):
        launch("kubernetes", 2, kubernetes={"rdma": rdma})


@pytest.mark.parametrize("names", [["A", "a"], ["a.b", "a_b"], ["big_"], ["größe"], ["p" * 40]])
def test_pools_whose_pods_have_no_names_of_hosts_of_their_own_are_refused(launch, kind, names):
    pools = [{"name": name} for name in names]
    config = {"model": {"path": "/m"}, "run": {"name": "trial-of-a-name"}, "generate": {"pools": pools}}
    made = launch("kubernetes", 2, config=config, kubernetes={"kind": kind})
    with pytest.raises(ConfigError, match=rf"generate\.pools: the name '{names[-1]}' .* allowed: up to 30 letters"):
        made.files()


def test_workers_are_numbered_through_the_pools(launch, kind):
    pools = [{"name": "large", "workers": 2}, {"name": "Small.1", "workers": 3}]
    config = {"model": {"path": "/m"}, "run": {"name": "trial"}, "generate": {"pools": pools}}
    made = launch("kubernetes", 2, config=config, kubernetes={"kind": kind})
    jobs = _jobs(list(yaml.safe_load_all(made.files()["run.yaml"])))
    assert {name: job["completions"] for name, job in jobs.items() if "generator" in name} == {
        "generator-large": 2,
        "generator-small-1": 3,
    }
    command = jobs["generator-small-1"]["template"]["spec"]["containers"][0]["args"][0]
    assert command.endswith('--index "$((2 + JOB_COMPLETION_INDEX))"')


def test_each_node_of_a_server_is_a_pod(launch, kind):
    pools = [{"name": "small", "workers": 3}, {"name": "wide", "workers": 2, "server_nodes": 2, "tensor_parallel": 16}]
    config = {"model": {"path": "/m"}, "run": {"name": "trial"}, "generate": {"pools": pools}}
    generators = {"nodes": 3, "gpus": 8}
    made = launch("kubernetes", 2, config=config, generators=generators, kubernetes={"kind": kind})
    job = _jobs(list(yaml.safe_load_all(made.files()["run.yaml"])))["generator-wide"]
    (container,) = job["template"]["spec"]["containers"]
    assert (job["completions"], container["resources"]["limits"]["nvidia.com/gpu"]) == (4, 8)
    worker, node = "$((3 + JOB_COMPLETION_INDEX / 2))", "$((JOB_COMPLETION_INDEX % 2))"
    assert container["args"][0].endswith(f'--index "{worker}" --node "{node}"')
    probe = container["startupProbe"]["exec"]["command"][-1]
    assert probe.endswith(f"generator-{worker}-node-{node}")


def test_a_name_that_is_too_long_for_a_host_is_refused(launch):
    config = {"model": {"path": "/m"}, "run": {"name": "n" * 41}}
    with pytest.raises(ConfigError, match=r"run\.name: n{41} makes no name of a host"):
        launch("kubernetes", 2, config=config)


def test_what_a_pod_would_not_see_is_refused(launch):
    with pytest.raises(ConfigError, match=r"folder: /scratch/runs is not on the claim at /shared"):
        launch("kubernetes", 2, folder="/scratch/runs")
    with pytest.raises(ConfigError, match=r"secrets: /root/secrets is a file of nodes"):
        launch("kubernetes", 2, secrets="/root/secrets")


def test_the_jobset_has_no_key_that_its_kind_does_not_know(launch):
    jobset = next(one for one in _documents(launch, "jobset", 8) if one["kind"] == "JobSet")
    for path, known in JOBSET.items():
        section = jobset
        for name in filter(None, path.split(".")):
            section = section[name]
        assert section.keys() <= known, path
    for job in jobset["spec"]["replicatedJobs"]:
        assert job.keys() == REPLICATED_JOB
        host = f"trial-{job['name']}-0-{job['template']['spec']['completions']}"
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", host)


@pytest.mark.skipif(
    importlib.util.find_spec("kubernetes_validate") is None, reason="the schemas are those of kubernetes-validate"
)
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_the_manifests_are_valid_by_the_published_schemas(launch, kind, version):
    import kubernetes_validate

    documents = _documents(launch, kind, 8, secret="wandb", node_selector={"gpu": "h200"})
    checked = [one for one in documents if one["kind"] != "JobSet"]
    for name, spec in _jobs(documents).items():  # those of a JobSet are Jobs too
        checked.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec})
    for document in checked:
        kubernetes_validate.validate(document, version, strict=True)
    broken = checked[-1] | {"spec": checked[-1]["spec"] | {"completion": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, version, strict=True)
