"""What can be known of the images and the compose file without building them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from docker_files import DOCKERFILES, FOLDER, ROOT, arguments_of, command, copies, instructions, load_yaml

from gateway.cli.main import _parser
from gateway.core.types import CacheMode
from gateway.settings.checks import is_loopback
from gateway.settings.errors import SettingsError
from gateway.settings.importers import load_settings
from gateway.web.guard import check_host
from gateway.web.paths import find

KEY = "sk-0123456789abcdef"
SETTINGS_IN_IMAGE = "/etc/kvgate/kvgate.toml"
every_image = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)


def settings_file(dockerfile: Path) -> Path:
    return ROOT / next(source for source, target in copies(dockerfile).items() if target == SETTINGS_IN_IMAGE)


def test_there_are_both_images():
    assert [path.stem for path in DOCKERFILES] == ["engine", "gateway"]


# ------------------------------------------------------------------------------------------------------------- images


@every_image
def test_every_instruction_is_one(path: Path):
    known = {"FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "HEALTHCHECK", "CMD"}
    assert {one.name for one in instructions(path)} <= known
    assert instructions(path)[0].name == "FROM"


@every_image
def test_every_source_of_a_copy_exists_and_is_no_ignored_file(path: Path):
    sources = copies(path)
    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert {"pyproject.toml", "constraints.txt", "gateway", "backends"} <= set(sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["readme"] in sources, "the build of the package reads it"


@every_image
def test_the_base_is_slim_and_has_a_python_that_the_project_takes(path: Path):
    (base,) = arguments_of(path, "FROM")
    version = re.fullmatch(r"python:3\.(\d+)-slim", base)
    assert version
    assert int(version[1]) >= 11


@every_image
def test_the_process_does_not_run_as_root(path: Path):
    names = [one.name for one in instructions(path)]
    (user,) = arguments_of(path, "USER")
    assert user not in {"root", "0"}
    assert names.index("USER") < names.index("CMD")
    assert any(f"useradd --create-home {user}" in run for run in arguments_of(path, "RUN"))


@every_image
def test_what_is_run_is_a_command_of_the_product_with_its_flags(path: Path):
    program, *arguments = command(path)
    parsed = _parser(arguments).parse_args(arguments)
    assert program == "kvgate"
    assert parsed.command == "serve"
    assert parsed.config == SETTINGS_IN_IMAGE


@every_image
def test_commands_run_while_building_exist(path: Path):
    for run in arguments_of(path, "RUN"):
        for call in re.findall(r"kvgate (\w+[^&|;]*)", run.replace("useradd --create-home kvgate", "")):
            arguments = call.split()
            assert _parser(arguments).parse_args(arguments).command == arguments[0]


@every_image
def test_the_health_check_asks_an_open_path_at_the_port_that_is_listened_on(path: Path):
    (check,) = arguments_of(path, "HEALTHCHECK")
    url = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", check)
    assert url
    place = find(url[2])
    assert place is not None
    assert place.name == "ready"
    settings = load_settings(settings_file(path), environ={"CLIENT_KEY": KEY}).settings
    assert settings.server.port == int(url[1])
    assert arguments_of(path, "EXPOSE") == [url[1]]


def test_only_the_engine_image_has_torch():
    installs = {path.stem: " ".join(arguments_of(path, "RUN")) for path in DOCKERFILES}
    assert "[engine]" in installs["engine"]
    assert "kvgate model pull smollm2" in installs["engine"]
    assert "[engine]" not in installs["gateway"]
    assert "model pull" not in installs["gateway"]


# ----------------------------------------------------------------------------------------------------------- settings


@every_image
def test_an_address_that_others_reach_comes_with_a_key(path: Path):
    settings = load_settings(settings_file(path), environ={"CLIENT_KEY": KEY}).settings
    assert not is_loopback(settings.server.host)
    assert [key.key.get_secret_value() for key in settings.keys] == [KEY]


@every_image
@pytest.mark.parametrize("environ", [{}, {"CLIENT_KEY": ""}], ids=["unset", "empty"])
def test_without_a_key_it_does_not_start(path: Path, environ: dict[str, str]):
    with pytest.raises(SettingsError, match="key"):
        load_settings(settings_file(path), environ=environ)


def test_the_engine_image_runs_both_modes_and_the_other_none():
    engine = load_settings(FOLDER / "engine.toml", environ={"CLIENT_KEY": KEY}).settings.effective_engine()
    gateway = load_settings(FOLDER / "gateway.toml", environ={"CLIENT_KEY": KEY}).settings
    assert engine is not None
    assert set(engine.modes) == set(CacheMode)
    assert gateway.effective_engine() is None
    assert gateway.server.api_base == "https://taotoken.net/api"


def test_the_upstream_of_the_gateway_image_comes_from_the_environment():
    environ = {"CLIENT_KEY": KEY, "UPSTREAM_URL": "http://10.0.0.2:8080/v1", "UPSTREAM_API_KEY": "sk-upstream"}
    server = load_settings(FOLDER / "gateway.toml", environ=environ).settings.server
    assert server.api_base == "http://10.0.0.2:8080/v1"
    assert server.api_key is not None


# ------------------------------------------------------------------------------------------------------------ compose


@pytest.fixture(name="compose")
def load_compose() -> dict[str, Any]:
    return load_yaml("compose.yaml")


def test_every_built_service_has_its_dockerfile(compose: dict[str, Any]):
    builds = [service["build"] for service in compose["services"].values() if "build" in service]
    assert sorted((FOLDER / build["context"] / build["dockerfile"]).resolve() for build in builds) == DOCKERFILES
    assert {(FOLDER / build["context"]).resolve() for build in builds} == {ROOT}


def test_ports_are_published_on_loopback_only(compose: dict[str, Any]):
    published = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert published
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in published)
    assert len({port.rsplit(":", 1)[0] for port in published}) == len(published), "two services on one port"


def test_a_service_refuses_to_start_without_a_client_key(compose: dict[str, Any]):
    for name in ("kvgate", "gateway"):
        assert compose["services"][name]["environment"]["CLIENT_KEY"].startswith("${CLIENT_KEY:?")


def test_variables_of_a_service_are_those_that_its_settings_read(compose: dict[str, Any]):
    for name, file in (("kvgate", "engine.toml"), ("gateway", "gateway.toml")):
        read = set(re.findall(r"\$\{(\w+)", (FOLDER / file).read_text(encoding="utf-8")))
        assert set(compose["services"][name]["environment"]) == read


def test_mounted_files_and_secrets_exist(compose: dict[str, Any]):
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            assert (FOLDER / volume.split(":")[0]).is_file()
        assert set(service.get("secrets", [])) <= set(compose["secrets"])


def test_only_the_engine_starts_without_a_profile(compose: dict[str, Any]):
    profiles = {name: service.get("profiles") for name, service in compose["services"].items()}
    assert profiles == {"kvgate": None, "gateway": ["upstream"], "prometheus": ["metrics"]}


# --------------------------------------------------------------------------------------------------------- prometheus


def test_prometheus_scrapes_an_address_that_the_gateway_lets_in(compose: dict[str, Any]):
    (job,) = load_yaml("prometheus.yml")["scrape_configs"]
    ((target,),) = [group["targets"] for group in job["static_configs"]]
    host, port = target.split(":")
    place = find(job["metrics_path"])
    assert place is not None
    assert place.name == "metrics"
    assert host in compose["services"]
    server = load_settings(FOLDER / "engine.toml", environ={"CLIENT_KEY": KEY}).settings.server
    assert server.port == int(port)
    check_host(target, server)


def test_prometheus_sends_the_client_key(compose: dict[str, Any]):
    (job,) = load_yaml("prometheus.yml")["scrape_configs"]
    secret = Path(job["authorization"]["credentials_file"]).name
    assert secret in compose["services"]["prometheus"]["secrets"]
    assert compose["secrets"][secret] == {"environment": "CLIENT_KEY"}
    assert f"--config.file={'/etc/prometheus/prometheus.yml'}" in compose["services"]["prometheus"]["command"]
