"""One file, environment and flags: who wins, where a value came from, and every mistake's line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tierkv.cli.daemon_settings import daemon_config
from tierkv.config import schema
from tierkv.config.document import FILE_BYTES_MAX
from tierkv.config.loading import Loaded, load
from tierkv.config.machine import Space, SystemMachine
from tierkv.config.sources import flag_of, variable_of
from tierkv.daemon.settings import DaemonConfig
from tierkv.storage.errors import ConfigError
from tierkv.storage.policy import WritePolicy

GIB = 1 << 30


class FakeMachine:
    """A tmpfs of 64 GiB below /dev/shm with 40 free; a disk of 1000 GiB with 500 free."""

    def space(self, folder: Path) -> Space:
        if folder == Path("/missing"):
            raise PermissionError(13, "Permission denied", str(folder))
        if folder.is_relative_to("/dev/shm"):
            return Space(64 * GIB, 40 * GIB)
        return Space(1000 * GIB, 500 * GIB)


def loaded(
    text: str | None,
    tmp_path: Path,
    environment: dict[str, str] | None = None,
    flags: dict[str, str] | None = None,
) -> Loaded:
    file = None
    if text is not None:
        file = tmp_path / "tierkv.yaml"
        file.write_text(text)
    return load(file, environment or {}, flags or {}, FakeMachine())


def mistakes(result: Loaded) -> list[str]:
    """Mistakes without the folder of the file."""
    return [
        str(mistake).rpartition("/tierkv.yaml")[2] or str(mistake) for mistake in result.mistakes
    ]


def source_of(result: Loaded, key: str) -> str:
    return next(value.source for value in result.in_force if value.key == key)


# Values and layers


def test_defaults_are_those_of_the_daemon(tmp_path: Path) -> None:
    assert daemon_config(loaded(None, tmp_path).settings()) == DaemonConfig()
    assert daemon_config(loaded("", tmp_path).settings()) == DaemonConfig()


def test_every_field_of_the_daemon_has_a_key(tmp_path: Path) -> None:
    # Each key is set to something else than its default; every field of the daemon must move.
    text = """
daemon: {socket: /s, socket_mode: 0660, socket_group: kv, users: [7, 8], workers: 9, stop: 1m}
host: {directory: /dev/shm/x, size: 50%, class_size: 50%, huge_pages: yes}
nvme: {directory: /n, size: 10%, class_size: 1GiB, min_free: 2GiB}
movement:
  write_policy: write_back
  selective_hits: 3
  admission: admit_all
  checksums: off
  verify_commit: sampled
  verify_commit_every: 4
  verify_lease: never
  write_budget: 1TiB
  scrub: 0
  preload: 10%
limits: {clients: 3, namespaces: 5, classes: 7, frame: 2MiB}
http: {bind: "::1", port: 9, token: secret}
log: {level: debug}
pool: {listen: node1, members: [node2], key_file: /k}
quotas:
  - {tenant: acme, host_floor: 25%, host_ceiling: 8GiB, ttl: 1d}
  - {namespace: a1, nvme_floor: 1GiB, nvme_ceiling: 50%}
"""
    config = daemon_config(loaded(text, tmp_path).settings())
    for field in dataclasses.fields(DaemonConfig):
        if field.name.startswith("mooncake"):
            continue  # Not beside a pool: test_config_pool.py.
        assert getattr(config, field.name) != getattr(DaemonConfig(), field.name), field.name
    assert (config.host_bytes, config.host_class_bytes) == (32 * GIB, 16 * GIB)
    assert (config.nvme_bytes, config.socket_mode) == (100 * GIB, 0o660)
    assert config.allowed_uids == (7, 8)
    assert config.write_policy is WritePolicy.WRITE_BACK
    first, second = config.quotas
    assert (first.tenant, first.host_floor_bytes, first.ttl_s) == ("acme", 8 * GIB, 86400)
    assert (second.namespace, second.nvme_ceiling_bytes) == ("a1", 50 * GIB)


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    text = "log:\n  level: debug\nhttp:\n  port: 1\nhost:\n  size: 2GiB\n"
    environment = {"TIERKV_HTTP_PORT": "2", "TIERKV_HOST_SIZE": "3GiB", "HOME": "/x"}
    result = loaded(text, tmp_path, environment, {"host.size": "4GiB"})
    settings = result.settings()
    assert (settings.log.level, settings.http.port, settings.host.size) == ("debug", 2, 4 * GIB)
    assert source_of(result, "limits.keys") == "default"
    assert source_of(result, "log.level") == f"{tmp_path}/tierkv.yaml:2"
    assert source_of(result, "http.port") == "environment TIERKV_HTTP_PORT"
    assert source_of(result, "host.size") == "--host-size"


def test_every_key_has_a_variable_and_a_flag(tmp_path: Path) -> None:
    for name, key in schema.all_keys():
        variable = variable_of(name)
        assert variable == "TIERKV_" + name.upper().replace(".", "_")
        assert flag_of(name).startswith("--") and "_" not in flag_of(name)
        text = key.default_text
        result = loaded(None, tmp_path, {variable: text}, {})
        assert result.mistakes == () and source_of(result, name) == f"environment {variable}"
    variables = [variable_of(name) for name, _ in schema.all_keys()]
    assert len(set(variables)) == len(variables)


def test_rules_can_be_set_from_outside(tmp_path: Path) -> None:
    text = "quotas:\n  - tenant: acme\n    ttl: 1d\n"
    environment = {"TIERKV_QUOTAS_0_HOST_CEILING": "1GiB"}
    flags = {"quotas.0.ttl": "2d", "quotas.1.namespace": "ab"}
    first, second = loaded(text, tmp_path, environment, flags).settings().quotas
    assert (first.tenant, first.ttl, first.host_ceiling) == ("acme", 2 * 86400, GIB)
    assert (second.tenant, second.namespace, second.ttl) == (None, "ab", None)


def test_a_token_is_never_shown(tmp_path: Path) -> None:
    result = loaded(None, tmp_path, {"TIERKV_HTTP_TOKEN": "hunter2"})
    assert result.settings().http.token == "hunter2"
    assert "hunter2" not in repr(result.in_force)
    broken = loaded(None, tmp_path, {"TIERKV_HTTP_TOKEN": "hunter2\n"})
    assert len(broken.mistakes) == 1 and "hunter2" not in str(broken.mistakes[0])


def test_numbers_mean_the_same_in_every_layer(tmp_path: Path) -> None:
    # YAML 1.1 would read 0600 as octal, 1_0 as ten and 1:30 as ninety.
    assert loaded("daemon: {socket_mode: 0600}", tmp_path).settings().daemon.socket_mode == 0o600
    assert loaded(None, tmp_path, {"TIERKV_DAEMON_SOCKET_MODE": "0600"}).mistakes == ()
    for text in ("1_0", "1:30", "0x10", "1e1"):
        assert len(loaded(f"http: {{port: {text}}}", tmp_path).mistakes) == 1, text


# Mistakes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host:\n  sise: 1\n", ":2: host.sise: unknown key; did you mean host.size?"),
        ("hots:\n  size: 1\n", ":1: hots: unknown section; did you mean host?"),
        ("zzzzzz: 1\n", ":1: zzzzzz: unknown section; expected one of daemon, host,"),
        ("host:\n  qqqq: 1\n", ":2: host.qqqq: unknown key; host has directory, size,"),
        ("host:\n  port: 1\n", ":2: host.port: unknown key; did you mean http.port?"),
        ("host.size: 1GiB\n", ":1: host.size: unknown key; write a section"),
        ("\nhost:\n  size: lots\n", ":3: host.size: expected a size such as 20GiB or 10%"),
        ("host:\n  size:\n", ":2: host.size: has no value; leave the key out for 1GiB"),
        ("host:\n  size: [1]\n", ":2: host.size: expected one value, got a list"),
        ("host:\n  size: {a: 1}\n", ":2: host.size: expected a value, got a mapping"),
        ("host: 5\n", ":1: host: expected keys below it, got a value"),
        ("host:\n  - size: 5\n", ":1: host: expected keys below it, got a list"),
        ("http:\n  port: 70000\n", ":2: http.port: expected a number from 0 to 65535"),
        ("http:\n  bind: 0.0.0.0\n", ":2: http.bind: expected one of 127.0.0.1, ::1, localhost"),
        ("log:\n  level: loud\n", ":2: log.level: expected one of debug, info, warning, error"),
        ("daemon:\n  stop: 30\n", ":2: daemon.stop: expected a duration such as 30s"),
        ("daemon:\n  stop: 0s\n", ":2: daemon.stop: expected a duration above 0"),
        ("http:\n  port: 1\n  port: 2\n", ":3: http.port: given twice, first in line 2"),
        ("http:\n  port: 1\nhttp:\n  bind: ::1\n", ":3: http: given twice, first in line 1"),
        ("http: {port: !!python/name:os.system x}\n", ":1: http.port: expected a plain value"),
        ("a: b: c\n", ":1: not YAML: mapping values are not allowed here"),
        ("log:\n  level: [info\n", ":3: not YAML: expected ',' or ']'"),
        ("log:\n\tlevel: info\n", ":2: not YAML: "),
        ("- a\n", ":1: expected sections such as host:, got a list"),
        ("text\n", ":1: expected sections such as host:, got 'text'"),
        ("---\nlog: {}\n---\nlog: {}\n", ":3: not YAML: "),
        ("? [a]\n: 1\n", ":1: expected a key, got a list"),
        ("quotas:\n  - ttl: 1d\n", ":2: quotas.0: expected either tenant or namespace"),
        ("quotas:\n  - tenant: a\n    tll: 1d\n", ":3: quotas.0.tll: unknown key; did you mean"),
        ("quotas: 7\n", ":1: quotas: expected a list of rules"),
        ("quotas:\n  acme:\n    ttl: 1d\n", ":1: quotas: expected a list of rules, got a mapping"),
        (
            "quotas:\n  - tenant: a\n    host_floor: 2MiB\n    host_ceiling: 1MiB\n",
            ":3: quotas.0.host_floor: expected at most host_ceiling (1048576)",
        ),
        (
            "quotas:\n- {tenant: a, host_floor: 60%}\n- tenant: b\n  host_floor: 60%\n",
            ":4: quotas.1.host_floor: the floors so far add up to",
        ),
        ("nvme:\n  size: 1GiB\n", ":2: nvme.size: needs nvme.directory"),
        ("nvme:\n  directory: /n\n", ":2: nvme.directory: needs nvme.size above 0"),
        ("host:\n  size: 0\n", ":2: host.size: expected above 0"),
        ("host:\n  class_size: 2GiB\n", ":2: host.class_size: expected 1 to host.size"),
        ("limits:\n  keys: 65536\n", "limits.frame: expected at least"),
        ("http:\n  bind: none\n  token: t\n", ":3: http.token: needs http.bind"),
        (f"daemon:\n  socket: /{'s' * 107}\n", ":2: daemon.socket: expected at most 107 bytes"),
        ("movement:\n  write_budget: 0\n", ":2: movement.write_budget: expected above 0"),
    ],
)
def test_a_mistake_is_one_line_that_names_its_place(
    tmp_path: Path, text: str, expected: str
) -> None:
    found = mistakes(loaded(text, tmp_path))
    assert len(found) == 1, found
    assert expected in found[0] and "\n" not in found[0]
    with pytest.raises(ConfigError, match=r"tierkv\.yaml|default"):
        loaded(text, tmp_path).settings()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("host:\n  size: 41GiB\n", (":2: host.size", "(40.0 GiB)", "tmpfs at /dev/shm", "lower")),
        ("host:\n  size: 90%\n", (":2: host.size", "got 61847529062")),
        ("nvme:\n  directory: /n\n  size: 50%\n", (":3: nvme.size", "beside min_free 1.0 GiB")),
        ("nvme:\n  directory: /n\n  size: 500GiB\n", (":3: nvme.size", "(499.0 GiB)")),
        ("nvme:\n  directory: /missing\n  size: 1\n", (":2: nvme.directory", "Permission denied")),
    ],
)
def test_c3_sizes_must_fit_the_machine(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    found = mistakes(loaded(text, tmp_path))
    assert len(found) == 1, found
    for word in words:
        assert word in found[0]


def test_every_mistake_is_found_in_one_look_and_in_order(tmp_path: Path) -> None:
    text = "log:\n  level: loud\nhttp:\n  port: x\n  prot: 1\n  port: 2\nnvmee:\n  a: 1\n  b: 2\n"
    result = loaded(text, tmp_path, {"TIERKV_HTTP_PROT": "1"}, {"host.size": "x"})
    lines = [mistake.place.rpartition("/tierkv.yaml:")[2] for mistake in result.mistakes]
    assert lines == ["2", "4", "5", "6", "7", "environment TIERKV_HTTP_PROT", "--host-size"]
    with pytest.raises(ConfigError, match=r"yaml:2: log.level.*and 6 more mistakes"):
        result.settings()


def test_what_follows_from_a_mistake_is_not_told_again(tmp_path: Path) -> None:
    found = mistakes(loaded("nvme:\n  directory: /n\n  size: x\n", tmp_path))
    assert len(found) == 1 and ":3: nvme.size" in found[0]


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("TIERKV_NVME_SISE", "did you mean TIERKV_NVME_SIZE?"),
        ("TIERKV_NVMEE_SIZE", "did you mean TIERKV_NVME_SIZE?"),
        ("TIERKV_LOG_ZZZZZZZZZZZZZZ", "see tierkv config show"),
        ("TIERKV_QUOTAS_X_TTL", "unknown variable"),
        ("TIERKV_QUOTAS_0_TTTL", "unknown variable"),
    ],
)
def test_unknown_variables_are_mistakes(tmp_path: Path, variable: str, hint: str) -> None:
    (mistake,) = loaded(None, tmp_path, {variable: "1"}).mistakes
    assert str(mistake).startswith(f"environment {variable}: unknown variable")
    assert hint in str(mistake)


@pytest.mark.parametrize("variable", ["TIERKV_API_KEY", "TIERKV_CONFIG", "TIERKVX", "HTTP_PORT"])
def test_variables_of_others_are_left_alone(tmp_path: Path, variable: str) -> None:
    assert loaded(None, tmp_path, {variable: "1"}).mistakes == ()


def test_an_unknown_key_on_the_command_line(tmp_path: Path) -> None:
    (mistake,) = loaded(None, tmp_path, {}, {"host.sise": "1"}).mistakes
    assert str(mistake) == "--host-sise: host.sise: unknown key; did you mean host.size?"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (mistake,) = load(tmp_path / "none", {}, {}, FakeMachine()).mistakes
    assert "cannot read it: No such file" in str(mistake)
    (mistake,) = load(tmp_path, {}, {}, FakeMachine()).mistakes
    assert "cannot read it: Is a directory" in str(mistake)
    file = tmp_path / "file"
    file.write_bytes(b"log:\n  level: \xff\n")
    (mistake,) = load(file, {}, {}, FakeMachine()).mistakes
    assert str(mistake).endswith("file:2: not UTF-8; convert the file")
    file.write_bytes(b"log:\n  level: \x01\n")
    (mistake,) = load(file, {}, {}, FakeMachine()).mistakes
    assert "file:2: not YAML: character '\\x01'" in str(mistake)
    file.write_bytes(b"#" * (FILE_BYTES_MAX + 1))
    (mistake,) = load(file, {}, {}, FakeMachine()).mistakes
    assert "expected at most" in str(mistake)
    file.write_bytes(b"[" * 5000)
    (mistake,) = load(file, {}, {}, FakeMachine()).mistakes
    assert "not YAML" in str(mistake)


def test_a_sections_keys_may_all_be_commented_out(tmp_path: Path) -> None:
    assert loaded("host:\n#  size: 1GiB\nquotas: []\n", tmp_path).mistakes == ()


# The real machine


def test_the_machine_counts_what_is_there_already_as_room(tmp_path: Path) -> None:
    machine = SystemMachine()
    before = machine.space(tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "pages").write_bytes(b"x" * (1 << 20))
    other = machine.space(tmp_path)
    ours = machine.space(tmp_path / "cache")
    assert 0 < ours.available_bytes <= ours.total_bytes + (1 << 20)
    assert before.total_bytes == ours.total_bytes == other.total_bytes


def test_a_folder_below_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        SystemMachine().space(tmp_path / "file" / "below")
