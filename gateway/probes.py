"""The health checks of a generation's targets. One whose settings were left as they were goes on being asked."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from gateway.parts import Close, PartUser
from gateway.service.guard import TargetGuard
from gateway.settings.schema import Settings, TargetSettings
from gateway.targets import all_targets, take_clients
from gateway.upstreams.http.clients import HttpClients
from gateway.upstreams.http.health_probe import HealthProbe


def start_probes(settings: Settings, parts: PartUser, guards: Mapping[str, TargetGuard]) -> None:
    """They end with the last generation that uses them. Each reports to the guard of its target, and to no other."""
    clients = take_clients(settings.timeouts, parts)
    for target in all_targets(settings):
        if target.health_path is not None:
            guard = guards[target.name]
            probe = parts.take(("probe", guard, target, clients), partial(_probe, target, clients, guard))
            probe.start()


def _probe(target: TargetSettings, clients: HttpClients, guard: TargetGuard) -> tuple[HealthProbe, Close]:
    probe = HealthProbe(target, clients, guard.checked)
    return probe, probe.close
