"""Which GPU each process gets: no two share one, the roles of a run and of a plan agree, what clashes is refused."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.description import Description
from launch.placement import place as place_on_nodes
from streamrl.config import Config
from streamrl.config.file import ConfigError, load
from streamrl.device_map import device_map, divide
from streamrl.engine import hardware
from streamrl.engine.server import Server, server_environment
from streamrl.generate import served
from streamrl.preflight.machine import check_machine
from streamrl.supervisor import Supervisor

pools = st.lists(
    st.fixed_dictionaries(
        {"workers": st.integers(1, 3), "servers": st.integers(1, 3), "tensor_parallel": st.sampled_from([1, 2, 4])},
        optional={"attach": st.just(["http://127.0.0.1:1"])},
    ),
    min_size=1,
    max_size=3,
)


def config_of(ranks: int, given: list[dict[str, Any]]) -> Config:
    named = [{"name": f"pool{number}", **pool} for number, pool in enumerate(given)]
    for pool in named:
        if "attach" in pool:
            pool.update(servers=1, workers=1)
    return Config.model_validate({"learner": {"ranks": ranks}, "generate": {"pools": named}})


def needed(config: Config) -> int:
    return config.learner.ranks + sum(pool.workers * pool.gpus for pool in config.generate.each_pool)


@given(ranks=st.integers(1, 4), given=pools, spare=st.integers(0, 3))
def test_no_two_processes_share_a_gpu_and_each_has_as_many_as_it_needs(ranks, given, spare):
    config = config_of(ranks, given)
    gpus = needed(config) + spare
    found = device_map(config, gpus)
    taken = [*found.ranks, *itertools.chain.from_iterable(itertools.chain(*found.workers))]
    assert len(set(taken)) == len(taken) == needed(config)
    assert set(taken) <= set(range(gpus))
    assert len(found.ranks) == ranks
    expected = [pool for pool in config.generate.each_pool for _ in range(pool.workers)]
    for pool, servers in zip(expected, found.workers, strict=True):
        assert len(servers) == (0 if pool.attach else pool.servers)
        assert all(len(server) == pool.tensor_parallel for server in servers)


@given(ranks=st.integers(1, 4), given=pools)
def test_a_gpu_too_few_is_refused(ranks, given):
    config = config_of(ranks, given)
    with pytest.raises(ConfigError, match=r"^(learner\.ranks|generate\.workers): .* allowed: "):
        device_map(config, needed(config) - 1)


@given(ranks=st.integers(1, 4), given=pools)
def test_one_node_of_a_cluster_has_the_same_map(ranks, given):
    config = config_of(ranks, given)
    one = Description.model_validate({"config": "x.yaml", "folder": "/shared", "learner": {"gpus": needed(config)}})
    workers = device_map(config, needed(config)).workers
    assert [worker.gpus for worker in place_on_nodes(one, config).workers] == [
        tuple(itertools.chain(*servers)) for servers in workers
    ]


@given(ranks=st.integers(1, 4), given=pools)
def test_in_a_shared_placement_servers_share_gpus_with_ranks_and_with_no_other_server(ranks, given):
    own = [{key: value for key, value in pool.items() if key != "attach"} for pool in given]
    tree = config_of(ranks, own).model_dump() | {"run": {"placement": "shared"}, "publish": {"transport": "memory"}}
    config = Config.model_validate(tree)
    servers = sum(pool.workers * pool.gpus for pool in config.generate.each_pool)
    found = device_map(config, max(ranks, servers))
    taken = [*itertools.chain.from_iterable(itertools.chain(*found.workers))]
    assert found.ranks == tuple(range(ranks))
    assert sorted(taken) == list(range(servers))
    with pytest.raises(ConfigError, match=r"^(learner\.ranks|generate\.workers): .* allowed: "):
        device_map(config, max(ranks, servers) - 1)
    one = Description.model_validate({"config": "x.yaml", "folder": "/s", "learner": {"gpus": max(ranks, servers)}})
    assert [worker.gpus for worker in place_on_nodes(one, config).workers] == [
        tuple(itertools.chain(*each)) for each in found.workers
    ]


def test_a_transport_that_cannot_reach_a_second_process_on_a_gpu_is_refused_there():
    config = Config.model_validate({"run": {"placement": "shared"}, "publish": {"transport": "broadcast"}})
    with pytest.raises(ConfigError, match=r"^publish\.transport: broadcast .* allowed: delta, disk, memory$"):
        device_map(config, 1)


def test_a_worker_that_sees_too_few_gpus_for_its_servers_is_refused():
    pool = config_of(1, [{"servers": 2, "tensor_parallel": 2}]).generate.each_pool[0]
    assert divide(["4", "5", "6", "7"], pool) == [("4", "5"), ("6", "7")]
    with pytest.raises(ConfigError, match=r"^generate\.servers: the 2 servers of a worker need 4 GPUs.* may use 3"):
        divide(["4", "5", "6"], pool)


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("tp-size: 2", "generate.tensor_parallel"),
        ("pp_size: 2", "generate.tensor_parallel"),
        ("base_gpu_id: 1", "CUDA_VISIBLE_DEVICES"),
        ("nnodes: 2", "generate.server_nodes"),
        ("dist-init-addr: 10.0.0.1:5000", "generate.server_nodes"),
        ("dp_size: 2", "generate.servers"),
    ],
)
def test_an_argument_of_sglang_that_would_move_its_ranks_is_refused(argument, instead):
    with pytest.raises(ValueError, match=rf"generate\.server_args: .* allowed: .*{instead}"):
        load(None, [f"generate.server_args={{{argument}}}"])
    load(None, ["generate.server_args={dp_size: 2, enable_dp_attention: true, pp_size: 1}"])


NODES = {"server_nodes": 2, "tensor_parallel": 8}


def test_each_node_of_a_server_has_an_equal_part_of_its_gpus():
    pool = config_of(1, [NODES]).generate.each_pool[0]
    assert (pool.gpus, divide(range(8), pool)) == (4, [(0, 1, 2, 3)])


@pytest.mark.parametrize(
    ("tree", "line"),
    [
        ({"generate": NODES | {"server_nodes": 3}}, "server_nodes: 3 cannot share tensor_parallel=8 evenly"),
        ({"generate": NODES | {"servers": 2}}, "servers: 2 is not possible with server_nodes=2"),
        ({"generate": NODES | {"attach": ["http://a:1"]}}, "attach: .* is not possible with server_nodes=2"),
        ({"generate": NODES, "publish": {"transport": "memory"}}, "one node of a server.* allowed: broadcast, disk"),
        ({"generate": NODES, "publish": {"transport": "delta"}}, "one node of a server.* allowed: broadcast, disk"),
        ({"generate": {"pools": [NODES | {"name": "a"}]}, "run": {"placement": "shared"}}, "allowed: 1, or run.place"),
    ],
)
def test_what_a_server_over_several_nodes_cannot_have_is_refused(tree, line):
    with pytest.raises(ValueError, match=line):
        Config.model_validate(tree)
    adapters = {"learner": {"lora": {"rank": 2, "publish": "adapter"}}, "publish": {"transport": "memory"}}
    Config.model_validate({"generate": NODES, **adapters})  # they are a folder, whatever the transport


def test_train_starts_no_server_over_several_nodes():
    with pytest.raises(ConfigError, match=r"server_nodes: a server over 2 nodes .* python -m streamrl\.launch\.render"):
        check_machine(Config.model_validate({"generate": NODES}))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], None]:
    """`gpus(8)`: a machine with that many, and a torch that is built for them."""

    def make(count: int) -> None:
        for number in range(count):
            (tmp_path / f"nvidia{number}").touch()
        (tmp_path / "nvidiactl").touch()
        monkeypatch.setattr(hardware, "DEVICES", tmp_path)
        monkeypatch.setattr(hardware, "torch_cuda", lambda: "13.0")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return make


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),
        ("-1", ()),
        ("2,3", ("2", "3")),
        ("3,-1,1", ("3",)),
        ("GPU-ab,MIG-cd", ("GPU-ab", "MIG-cd")),
    ],
)
def test_the_gpus_that_may_be_used_are_those_of_the_variable(gpus, monkeypatch, chosen, seen):
    gpus(4)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert hardware.visible_gpus() == seen
    assert hardware.has_cuda() == bool(seen)


def test_a_gpu_machine_with_a_torch_for_cpus_has_none(gpus, monkeypatch, tmp_path):
    gpus(2)
    monkeypatch.setattr(hardware, "torch_cuda", lambda: None)
    assert not hardware.has_cuda()
    monkeypatch.setattr(hardware, "torch_cuda", lambda: "13.0")
    assert hardware.has_cuda()


def test_windows_subsystem_has_one_behind_its_device(gpus, tmp_path):
    gpus(0)
    assert not hardware.has_cuda()
    (tmp_path / "dxg").touch()
    assert hardware.visible_gpus() == ("0",)


def test_the_installed_torch_says_what_it_is_built_for(monkeypatch, tmp_path):
    import torch

    assert hardware.torch_cuda.__wrapped__() == torch.version.cuda
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/version.py").write_text("__version__ = '2.14.1+cu130'\ncuda: Optional[str] = '13.0'\n")
    spec = type("Spec", (), {"origin": str(tmp_path / "torch/__init__.py")})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert hardware.torch_cuda.__wrapped__() == "13.0"


def test_every_role_that_train_starts_gets_its_own_gpus(gpus, monkeypatch, tmp_path):
    gpus(0)
    config = load(None, ["learner.ranks=2", "generate.workers=2", "generate.servers=2", f"run.folder={tmp_path}"])
    assert "CUDA_VISIBLE_DEVICES" not in Supervisor(config, tmp_path / "run").learner.environment
    gpus(8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2")
    supervisor = Supervisor(config, tmp_path / "run")
    shares = [role.environment.get("CUDA_VISIBLE_DEVICES") for role in supervisor.roles]
    assert shares == [None, "5,4", "3,2", "7,6"]  # replay service, two workers, learner


class Started:
    """What a worker asks for."""

    address = "http://127.0.0.1:1"

    def __init__(self, *_: Any, gpus: tuple[str, ...], **__: Any) -> None:
        self.gpus = gpus


def test_every_server_of_a_worker_gets_its_own_gpus(gpus, monkeypatch, tmp_path):
    gpus(8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(served, "Server", Started)
    config = load(None, ["generate.servers=2", "generate.tensor_parallel=2", f"run.folder={tmp_path}"])

    async def start() -> list[tuple[str, ...]]:
        models = [served.ServedModel(config, tmp_path, index=0, place=place) for place in range(2)]
        for model in models:
            await model.client.close()
        return [model._process.gpus for model in models]

    assert asyncio.run(start()) == [("4", "5"), ("6", "7")]


def test_a_servers_process_sees_its_gpus_alone(monkeypatch, tmp_path):
    seen: list[dict[str, str]] = []

    class Popen:
        def __init__(self, *_: Any, env: dict[str, str], **__: Any) -> None:
            seen.append(env)

    monkeypatch.setattr("streamrl.engine.server.subprocess.Popen", Popen)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server = Server(Config(), tmp_path, index=0, gpus=("4", "5"))
    server._reserved.close()
    assert seen[0]["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_both_ends_of_a_broadcast_have_the_same_nccl_variables(gpus, monkeypatch):
    gpus(2)
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")  # the user's own word, at both ends
    expected = {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    assert hardware.nccl_environment() == expected
    assert expected.items() <= server_environment(Config()).items()


def test_a_server_of_the_runs_own_on_gpus_is_refused_in_a_dtype_that_sglangs_norms_do_not_have(gpus):
    gpus(2)
    with pytest.raises(
        ConfigError, match=r"^model\.dtype: float32 cannot be served on a GPU, .*; allowed: auto, bfloat"
    ):
        check_machine(load(None, ["model.dtype=float32"]))
    for words in (
        ["model.dtype=bfloat16"],
        ["model.dtype=float32", "generate.attach=[http://a:1]"],
        ["model.dtype=float32", "generate.server_args.dtype=bfloat16"],
    ):
        check_machine(load(None, words))


def test_what_is_preloaded_into_a_server_that_takes_turns_finds_the_runtime_of_torch(gpus, monkeypatch, tmp_path):
    folder = tmp_path / "site/nvidia/cu13/lib"
    folder.mkdir(parents=True)
    (folder / "libcudart.so.13").touch()
    (tmp_path / "site/nvidia/cudnn/lib").mkdir(parents=True)
    spec = SimpleNamespace(origin=str(tmp_path / "site/torch/__init__.py"))
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: spec)
    assert hardware.cuda_libraries() == str(folder)
    gpus(1)
    shared = load(None, ["run.placement=shared", "publish.transport=memory"])
    for users, expected in ((None, str(folder)), ("/a:/b", f"{folder}:/a:/b")):
        monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
        if users is not None:
            monkeypatch.setenv("LD_LIBRARY_PATH", users)
        assert server_environment(shared)["LD_LIBRARY_PATH"] == expected
        assert "LD_LIBRARY_PATH" not in server_environment(Config())
