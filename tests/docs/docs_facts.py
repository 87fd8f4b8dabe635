"""What the tables of README have to say, read off the code."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from prometheus_client.metrics import MetricWrapperBase
from pydantic_core import PydanticUndefined

from gateway.cli.main import _parser
from gateway.metrics import Metrics
from gateway.metrics_bulk import BulkHistogram
from gateway.settings.options import table_model
from gateway.settings.validation import allowed_values
from gateway.web.errors import STATUS

HIDDEN_ACTIONS = (argparse._HelpAction, argparse._SubParsersAction)


def setting_rows(name: str) -> list[list[str]]:
    """Option, default, allowed values: the first three columns of a settings table."""
    fields = table_model(name).model_fields
    return [[f"`{key}`", default_text(field.default), allowed_values(name, key)] for key, field in fields.items()]


def default_text(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "not set"
    return f"`{json.dumps(value)}`"


def metric_rows() -> list[list[str]]:
    """Series, type, labels, meaning."""
    metrics = Metrics()
    rows = []
    for collector in dict.fromkeys(metrics.registry._collector_to_names):
        assert isinstance(collector, MetricWrapperBase | BulkHistogram)
        family = next(iter(collector.collect()))
        name = f"{family.name}_total" if family.type == "counter" else family.name
        names = collector.label_names if isinstance(collector, BulkHistogram) else collector._labelnames
        labels = ", ".join(f"`{label}`" for label in names) or "none"
        rows.append([f"`{name}`", family.type, labels, family.documentation])
    return rows


def error_rows() -> list[tuple[str, str, str]]:
    """Status, code, type."""
    return [(str(status), error.code or "null", kind) for error, (status, kind) in STATUS.items()]


def command_parser(*command: str) -> argparse.ArgumentParser:
    """The parser of a command, as `kvgate COMMAND --help` has it."""
    parser = _parser(list(command))
    for name in command:
        parser = subparsers(parser).choices[name]
    return parser


def subparsers(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    return next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))


def flags(*command: str) -> Iterator[tuple[str, Any]]:
    """Every flag and its default."""
    for action in command_parser(*command)._actions:
        if not isinstance(action, HIDDEN_ACTIONS):
            yield "/".join(action.option_strings) or str(action.dest), action.default
