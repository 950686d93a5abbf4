"""Where the roles of a run go, and which descriptions are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.description import Description, load
from launch.placement import place
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError


def test_one_node_gives_its_first_gpus_to_the_learner_and_the_others_to_the_workers(launch):
    placement = launch("slurm", 1).placement
    assert (placement.learner_nodes, placement.ranks, placement.nodes) == (1, 4, 1)
    assert [(worker.node, worker.gpus) for worker in placement.workers] == [(0, (4, 5)), (0, (6, 7))]


@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_no_gpu_is_given_away_twice_and_every_worker_stays_on_one_node(launch, nodes):
    placement = launch("slurm", nodes).placement
    given = [(worker.node, gpu) for worker in placement.workers for gpu in worker.gpus]
    assert len(given) == len(set(given)) == 2 * len(placement.workers)
    assert [worker.index for worker in placement.workers] == list(range(2 * max(1, nodes // 2)))
    learners = range(placement.learner_nodes)
    assert nodes == 1 or not any(worker.node in learners for worker in placement.workers)


def test_pools_of_several_sizes_fill_the_nodes_in_their_order(describe):
    pools = [{"name": "large", "workers": 1, "tensor_parallel": 4}, {"name": "small", "workers": 3}]
    path = describe(
        config={"generate": {"pools": pools}, "model": {"path": "/m"}},
        learner={"nodes": 1},
        generators={"nodes": 2, "gpus": 6},
    )
    description, config = load(path)
    workers = place(description, config).workers
    assert [(worker.pool, worker.node, worker.gpus) for worker in workers] == [
        ("large", 1, (0, 1, 2, 3)),
        ("small", 1, (4,)),
        ("small", 1, (5,)),
        ("small", 2, (0,)),
    ]


NODES = {"server_nodes": 2, "tensor_parallel": 8}


def test_the_parts_of_a_server_over_two_nodes_are_on_two_nodes_with_as_many_gpus_each(describe):
    pools = [{"name": "wide", "workers": 2, **NODES}, {"name": "narrow", "workers": 2, "tensor_parallel": 2}]
    path = describe(
        config={"generate": {"pools": pools}, "model": {"path": "/m"}},
        learner={"nodes": 1},
        generators={"nodes": 3, "gpus": 8},
    )
    workers = place(*load(path)).workers
    assert [(worker.name, worker.node, worker.gpus) for worker in workers] == [
        ("generator-0", 1, (0, 1, 2, 3)),
        ("generator-0-node-1", 2, (0, 1, 2, 3)),
        ("generator-1", 1, (4, 5, 6, 7)),
        ("generator-1-node-1", 2, (4, 5, 6, 7)),
        ("generator-2", 3, (0, 1)),
        ("generator-3", 3, (2, 3)),
    ]


@pytest.mark.parametrize(("nodes", "workers"), [(2, 1), (2, 3), (3, 2), (5, 4)])
def test_without_gpus_no_two_parts_of_a_server_are_on_one_node(describe, nodes, workers):
    path = describe(
        config={"generate": NODES | {"workers": workers}, "model": {"path": "/m"}},
        learner={"nodes": 1, "gpus": 0},
        generators={"nodes": nodes, "gpus": 0},
    )
    placed = place(*load(path)).workers
    assert [(worker.index, worker.rank) for worker in placed] == [
        (each, rank) for each in range(workers) for rank in (0, 1)
    ]
    assert all(first.node != second.node for first, second in zip(placed[::2], placed[1::2], strict=True))


def test_without_gpus_the_workers_are_spread_evenly(launch):
    cpu = {"learner": {"nodes": 1, "gpus": 0}, "generators": {"nodes": 2, "gpus": 0}, "hosts": ["a", "b", "c"]}
    workers = launch("hosts", 3, config={"model": {"path": "/m"}, "generate": {"workers": 4}}, **cpu).placement.workers
    assert [worker.node for worker in workers] == [1, 1, 2, 2]
    assert not any(worker.gpus for worker in workers)


@pytest.mark.parametrize(
    ("description", "config", "line"),
    [
        ({"learner": {"nodes": 3}}, {"learner": {"ranks": 4}}, "learner.nodes: learner.ranks=4 do not divide over 3"),
        ({"learner": {"gpus": 2}}, {"learner": {"ranks": 4}}, "no room for learner.ranks=4; allowed: from 2 on"),
        ({"learner": {"gpus": 2}}, {"generate": {"tensor_parallel": 2}}, "generators: worker 0 needs 2 GPUs"),
        ({"learner": {"nodes": 1}}, {"generate": NODES}, "server_nodes: 2 nodes of a server are more than the 1 of"),
        (
            {"generators": {"nodes": 2, "gpus": 3}},
            {"generate": NODES},
            "worker 0 needs 4 GPUs on each of 2 nodes, and none of 2 nodes has them left; allowed: more than 6 GPUs",
        ),
        ({"folder": "runs"}, {}, "folder: runs is another one on each node"),
        ({"folder": "/shared/my runs"}, {}, "folder: '/shared/my runs' would need quotes in a script"),
        (
            {},
            {"task": {"name": "jsonl", "args": {"path": "sums.jsonl", "prompt": "q", "answer": "a"}}},
            "path: sums.jsonl, prompt: q} has a path that is another one on each node; allowed: absolute paths",
        ),
        ({}, {"stream": {"keys": "keys"}}, "stream.keys: keys has a path that is another one on each node"),
        ({}, {"algo": {"kl": 0.1, "reference": "old"}}, "algo.reference: old has a path that is another one"),
        ({"grace": 10}, {}, "grace: 10 s are fewer than run.stop_timeout=60"),
        ({}, {"model": {"path": "models/tiny"}}, "model.path: models/tiny is another one on each node"),
        (
            {"generators": {"nodes": 1}},
            {"publish": {"transport": "memory"}},
            "publish.transport: memory reaches the servers of the learner's node alone",
        ),
        ({}, {"replay": {"order": "tests/replay/test_order_conformance.py:OutOfOrder"}}, "OutOfOrder is another file"),
        ({"environment": {"WANDB_API_KEY": "x"}}, {}, "environment: WANDB_API_KEY would be written into a script"),
        ({}, {"generate": {"server_args": {"api-key": "x"}}}, "generate.server_args: api-key would be written"),
        ({"python": "python; true"}, {}, "python: string should match pattern"),
        ({"slurm": {"options": ["exclusive"]}}, {}, "slurm.options: 'exclusive' is no option of sbatch"),
        ({"nodes": 4}, {}, "nodes: extra inputs are not permitted (given 4); allowed: config"),
    ],
)
def test_what_would_fail_on_the_nodes_is_refused_by_one_line(describe, description, config, line):
    path = describe(config={"model": {"path": "/m"}} | config, **description)
    with pytest.raises(ConfigError, match=re.escape(line)) as refused:
        place(*load(path))
    assert "\n" not in str(refused.value)


def test_every_recipe_has_its_place_on_nodes_of_eight_gpus():
    recipes = [path for folder in ("megatron_rl", "verl") for path in Path("configs/recipes", folder).glob("*.yaml")]
    assert recipes
    for path in recipes:
        config = config_file.load(path)
        gpus = sum(pool.workers * pool.servers * pool.tensor_parallel for pool in config.generate.each_pool)
        nodes = {"learner": {"nodes": -(-config.learner.ranks // 8)}, "generators": {"nodes": -(-gpus // 8)}}
        description = Description.model_validate({"config": path, "folder": "/shared/runs"} | nodes)
        placement = place(description, config)
        assert placement.ranks * placement.learner_nodes == config.learner.ranks, path
        assert sum(len(worker.gpus) for worker in placement.workers) == gpus, path


def test_a_pod_has_to_fit_on_a_node_and_no_more(launch):
    config = {"model": {"path": "/m"}, "run": {"name": "trial"}, "generate": {"workers": 9, "tensor_parallel": 4}}
    assert launch("kubernetes", 2, config=config).placement.workers == ()
    config["generate"]["tensor_parallel"] = 8
    with pytest.raises(ConfigError, match=r"generators\.gpus: 4 of a node are too few for a worker; allowed: from 8"):
        launch("kubernetes", 2, config=config)


def test_a_configuration_that_is_not_there_is_named(describe):
    path = describe()
    path.write_text(path.read_text().replace("config.yaml", "none.yaml"))
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file or directory"):
        load(path)
