# SPDX-License-Identifier: Apache-2.0
"""What the dashboard and the rules ask Prometheus for."""

import json
import re

import yaml

from .conftest import DASHBOARD, RULES

#: A metric of vLLM's or ours, in a query.
NAME = re.compile(r"vllm:\w+")
#: What Grafana puts in place of its variables, with everything chosen.
VARIABLES = {"$model": ".*", "$engine": ".*", "$__rate_interval": "1m"}


def dashboard() -> dict:
    return json.loads(DASHBOARD.read_text())


def panels() -> dict[str, list[str]]:
    """The queries of each panel, by its title."""
    return {
        panel["title"]: [fill(target["expr"]) for target in panel["targets"]]
        for panel in dashboard()["panels"]
    }


def fill(query: str) -> str:
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query


def rules() -> dict[str, str]:
    """The query of each alert, by its name."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def names() -> set[str]:
    """All metrics that are asked for, the variables of the dashboard included."""
    variables = [str(v.get("query")) for v in dashboard()["templating"]["list"]]
    queries = [*variables, *rules().values(), *(q for some in panels().values() for q in some)]
    return {name for query in queries for name in NAME.findall(query)}
