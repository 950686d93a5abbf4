"""The endpoint over real HTTP, read by Prometheus's own parser, and the dashboard that asks for its names."""

from __future__ import annotations

import json
import re
import socket
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from run_parts import Recorded, small_run

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.observe.events import now
from streamrl.observe.metrics import METRICS
from streamrl.observe.prometheus import Exporter, check_address, families, prometheus_name

DASHBOARD = Path(__file__).parents[2] / "launch" / "grafana.json"
# Functions and words of PromQL; whatever else a query names is a metric or a label.
PROMQL = {"rate", "sum", "avg", "max", "min", "by", "without", "on", "ignoring", "clamp_min"}


@pytest.fixture
def serve():
    """`serve(folder)` -> what one look at the endpoint of a run folder gives: {(name, labels): value}."""
    exporters: list[Exporter] = []

    def look(folder: Path) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        if not exporters:
            exporters.append(Exporter(folder, port=0))
        with urllib.request.urlopen(f"http://127.0.0.1:{exporters[0].port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    yield look
    for exporter in exporters:
        exporter.close()


def test_the_last_step_and_the_time_of_each_role_are_served_under_the_names_of_the_table(tmp_path, serve):
    run = small_run(tmp_path)
    metrics = {
        "reward/mean": 0.75, "offpolicy/ess": 0.9, "offpolicy/ess/s0": 1.0, "offpolicy/ess/s9+": 0.5,
        "eval/copy/pass@8": 0.25, "reward/part/s0": 0.125, "task/a.b/pass_rate": 0.375,
        "version": "3.0", "grad_norm": None,
    }  # fmt: skip
    run.row(3, 19.5, **metrics)
    served = serve(tmp_path)
    assert served["streamrl_reward_mean", ()] == 0.75
    assert served["streamrl_offpolicy_ess", (("staleness", "all"),)] == 0.9
    assert served["streamrl_offpolicy_ess", (("staleness", "s9+"),)] == 0.5
    assert served["streamrl_eval_pass_8", (("task", "copy"),)] == 0.25
    assert served["streamrl_reward_part", (("part", "s0"),)] == 0.125
    assert served["streamrl_task_pass_rate", (("task", "a.b"),)] == 0.375
    assert served["streamrl_step", ()] == 3
    assert served["streamrl_phase_seconds_total", (("phase", "wait"), ("role", "learner-0"))] == pytest.approx(10)
    assert served["streamrl_roofline_tokens_per_s", (("of", "now"),)] > 0
    assert sum(value for (name, _), value in served.items() if name == "streamrl_held_up_share") == pytest.approx(1)
    assert not [name for name, _ in served if "version" in name or "grad_norm" in name]
    known = {name.replace("_pass_K", "_pass_8") for name in families()}
    assert {name for name, _ in served} <= known


def test_a_hint_is_served_while_it_goes_on(tmp_path, serve):
    run = small_run(tmp_path)
    for step in range(3, 23):
        run.row(step, 16.0 + step, **{"offpolicy/ess": 0.2})
    assert serve(tmp_path)["streamrl_hint", (("name", "off_policy"),)] == 1
    for step in range(23, 43):
        run.row(step, 16.0 + step, **{"offpolicy/ess": 1.0})
    assert not [name for name, _ in serve(tmp_path) if name == "streamrl_hint"]


def test_counters_grow_with_the_run(tmp_path, serve):
    begin = now() - 100
    run = Recorded(tmp_path)
    run.life("learner-0", begin, begin, None)
    run.span("learner-0", "learner.wait", begin, None, step=0)
    run.write()
    key = ("streamrl_phase_seconds_total", (("phase", "wait"), ("role", "learner-0")))
    first = serve(tmp_path)[key]
    assert 99 < first < 130
    time.sleep(0.05)
    assert serve(tmp_path)[key] > first


def test_a_run_that_has_not_begun_serves_nothing_of_its_own(tmp_path, serve):
    assert not [name for name, _ in serve(tmp_path) if name.startswith("streamrl_") and "_held_up" not in name]


def test_the_endpoint_is_off_by_default_on_loopback_where_it_is_on_and_refused_where_its_port_is_taken(tmp_path):
    assert Exporter.of(Config(), tmp_path) is None
    assert Config().observe.prometheus_host == "127.0.0.1"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = Config.model_validate({"observe": {"prometheus_port": port}})
        with pytest.raises(ConfigError, match=rf"observe.prometheus_port: 127.0.0.1:{port} cannot be used .*in use"):
            Exporter.of(config, tmp_path)
        with pytest.raises(ConfigError, match="in use"):
            check_address(config)
    check_address(config)
    check_address(Config())


@pytest.mark.parametrize("host", ["a..b", "n" * 70, "nowhere.invalid"])
def test_a_host_that_is_no_name_is_refused_in_one_line(host, tmp_path):
    config = Config.model_validate({"observe": {"prometheus_port": 9464, "prometheus_host": host}})
    for asked in (lambda: check_address(config), lambda: Exporter.of(config, tmp_path)):
        with pytest.raises(ConfigError, match=rf"^observe.prometheus_port: {host}:9464 cannot be used \(.*\); allowed"):
            asked()


def test_no_two_metrics_have_the_same_name_for_prometheus():
    assert len({prometheus_name(metric.name)[0] for metric in METRICS}) == len(METRICS)
    assert all(re.fullmatch(r"[a-zA-Z_]\w*", name) for name in families())


def test_the_dashboard_asks_for_names_that_there_are():
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(queries) >= 15
    for query in queries:
        words = set(re.findall(r"[a-zA-Z_]\w*", re.sub(r"\{[^}]*\}|\[[^\]]*\]|by *\([^)]*\)", "", query)))
        assert {word for word in words if word.startswith("streamrl_")} <= families(), query
        assert words - families() <= PROMQL, query
        assert words & families(), query
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)
