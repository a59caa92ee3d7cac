# SPDX-License-Identifier: Apache-2.0
"""The configuration and the rules, by Prometheus' own tool."""

import subprocess
from pathlib import Path

import yaml

from . import queries
from .conftest import CONFIG

CASES = Path(__file__).with_name("alerts_test.yml")


def test_the_configuration_and_its_rules_are_in_form(promtool):
    subprocess.run([promtool, "check", "config", "--lint-fatal", CONFIG], check=True)


def test_each_alert_fires_when_it_should_and_only_then(promtool):
    subprocess.run([promtool, "test", "rules", CASES], check=True)


def test_every_alert_is_seen_to_fire_and_not_to_fire():
    """The cases leave none out, so that a new alert comes with its own."""
    fires: dict[str, set[bool]] = {}
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        for asked in case["alert_rule_test"]:
            fires.setdefault(asked["alertname"], set()).add(bool(asked["exp_alerts"]))
    assert fires == {name: {True, False} for name in queries.rules()}
