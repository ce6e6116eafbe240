"""A node's metrics, as Prometheus reads them."""

from __future__ import annotations

import re
import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def address_in(log):
    """Where a node says that its metrics are."""
    host, port = re.search(r"metrics at http://([\d.]+):(\d+)/metrics", log).groups()
    return host, int(port)


def families_at(address):
    with urllib.request.urlopen("http://{}:{}/metrics".format(*address), timeout=30) as answer:
        return list(text_string_to_metric_families(answer.read().decode()))


def scrape(address):
    """Samples by name and labels."""
    return {(each.name, *each.labels.values()): each.value for one in families_at(address) for each in one.samples}
