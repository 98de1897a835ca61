"""`config.toml` as an agent reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from exec_server.agent.mcp_client import McpServer
from exec_server.agent.settings import BadConfig, load_config

WHOLE = """
model = "m"
model_provider = "mine"
sandbox_mode = "workspace-write"
approval_policy = "on-failure"
model_reasoning_effort = "high"
web_search = "live"
somebody_elses = true

[model_providers.mine]
base_url = "http://127.0.0.1:1/v1"
env_key = "MY_KEY"
stream_max_retries = 2
stream_idle_timeout_ms = 1500
http_headers = { x = "y" }

[mcp_servers.docs]
command = "docs"
args = ["--fast"]
env = { A = "b" }
startup_timeout_sec = 1.5

[mcp_servers.far]
url = "http://127.0.0.1:2/mcp"
bearer_token_env_var = "MY_KEY"
required = true

[mcp_servers.off]
command = "x"
enabled = false
"""


def test_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(WHOLE)
    config = load_config(str(tmp_path), {"MY_KEY": "secret"})
    model = config.model_settings()
    assert (model.model, model.base_url, model.api_key) == ("m", "http://127.0.0.1:1/v1", "secret")
    assert (model.max_retries, model.idle_seconds, dict(model.headers)) == (2, 1.5, {"x": "y"})
    assert (config.mode, config.approvals) == ("workspace-write", "on-request")
    assert (config.reasoning_effort, config.web_search) == ("high", True)
    far = {"Authorization": "Bearer secret"}
    assert config.servers == (
        McpServer(name="docs", command="docs", args=("--fast",), env={"A": "b"}, startup_seconds=1.5),
        McpServer(name="far", url="http://127.0.0.1:2/mcp", headers=far, required=True),
    )


def test_what_is_said_elsewhere_wins(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('model = "m"\n')
    chosen = load_config(str(tmp_path), {}).model_settings("n", "http://x", "k")
    assert (chosen.model, chosen.base_url, chosen.api_key) == ("n", "http://x", "k")


def test_nothing_at_all(tmp_path: Path) -> None:
    config = load_config(str(tmp_path), {})
    with pytest.raises(BadConfig, match="which model"):
        config.model_settings()


def test_a_provider_gets_no_key_that_is_not_its_own(tmp_path: Path) -> None:
    def key_of(more: str) -> str | None:
        (tmp_path / "config.toml").write_text(
            f'model_provider = "p"\n[model_providers.p]\nbase_url = "http://127.0.0.1:1"\n{more}'
        )
        return load_config(str(tmp_path), {"OPENAI_API_KEY": "secret", "MINE": "mine"}).api_key

    assert key_of("") == ""
    assert key_of('env_key = "MINE"') == "mine"
    assert key_of("requires_openai_auth = true") is None  # that of the vendor, from its variable


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "failed to read"),
        ("model = 5", "`model` must be a text"),
        ('sandbox_mode = "yolo"', "`sandbox_mode` must be one of read-only"),
        ('approval_policy = "perhaps"', "`approval_policy` must be one of never"),
        (
            'approval_policy = "untrusted"',
            "`approval_policy` must be one of never, on-request, on-failure here",
        ),
        ('model_provider = "zz"', r"`model_provider` is `zz`, but there is no \[model_providers.zz\]"),
        ('model_provider = "zz"\n[model_providers.z]\nbase_url = "b"', "there is no"),
        ('model_provider = "p"\n[model_providers.p]\nenv_key = "NOT_SET"', "NOT_SET, which is not set"),
        ('model_provider = "p"\n[model_providers.p]\nstream_max_retries = -1', "must be a number"),
        ("[mcp_servers.x]", "either `command` or `url`"),
        ('[mcp_servers.x]\ncommand = "a"\nurl = "b"', "either `command` or `url`"),
        ('[mcp_servers.x]\ncommand = "a"\nargs = [1]', "`args` must be a list of texts"),
        ('[mcp_servers.x]\ncommand = "a"\nenv = {A = 1}', "`env` must be a table of texts"),
        ('[mcp_servers.x]\ncommand = "a"\nrequired = 1', "`required` must be true or false"),
        ('[mcp_servers.x]\ncommand = "a"\nenabled_tools = "a"', "`enabled_tools` must be a list of texts"),
        ('[mcp_servers.x]\ncommand = "a"\nenv_vars = [{}]', "`env_vars` must be a list of names"),
    ],
)
def test_what_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(BadConfig, match=said):
        load_config(str(tmp_path), {})


def test_what_a_tool_server_is_given_and_offers(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        """
        [mcp_servers.docs]
        command = "docs"
        env_vars = ["A", "B", "NOT_SET", { name = "C", source = "local" }]
        env = { B = "mine" }
        enabled_tools = ["a", "b"]
        disabled_tools = ["b"]

        [mcp_servers.far]
        url = "http://127.0.0.1:2/mcp"
        http_headers = { X-A = "1" }
        env_http_headers = { X-B = "A", X-C = "NOT_SET", X-D = "BLANK" }
        enabled_tools = []
        """
    )
    docs, far = load_config(str(tmp_path), {"A": "a", "B": "b", "C": "c", "D": "d", "BLANK": " "}).servers
    assert docs.env == {"A": "a", "B": "mine", "C": "c"}
    assert [tool for tool in "abc" if docs.offers(tool)] == ["a"]
    assert far.headers == {"X-A": "1", "X-B": "a"}
    assert not far.offers("a")


# What is given on the command line -------------------------------------------------------------------------


def test_settings_that_win(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('model = "a"\n[agents]\nmax_threads = 3\n')
    overrides = [
        'model="b"',
        "sandbox_mode=workspace-write",
        "sandbox_workspace_write.network_access=true",
        'sandbox_workspace_write.writable_roots = ["/data"]',
        "agents.max_depth=2",
        "model_auto_compact_token_limit=1000",
        "model_context_window=5000",
        'mcp_servers.docs={ command = "x", default_tools_approval_mode = "prompt" }',
        'mcp_servers.docs.tools.find.approval_mode="approve"',
    ]
    config = load_config(str(tmp_path), {}, overrides)
    assert (config.model, config.mode) == ("b", "workspace-write")
    assert (config.network, config.writable) == (True, ("/data",))
    assert (config.max_agents, config.agent_depth) == (3, 2)
    assert (config.compact_tokens, config.context_window) == (1000, 5000)
    (server,) = config.servers
    assert (server.approval, server.tool_approvals) == ("prompt", {"find": "approve"})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model", "is not KEY=VALUE"),
        ("=x", "is not KEY=VALUE"),
        ("a..b=x", "is not KEY=VALUE"),
        ("model.x=1", "`model` is no table"),
        (
            'mcp_servers.d={ command = "x", default_tools_approval_mode = "perhaps" }',
            "must be one of auto, prompt",
        ),
        ("model_context_window=many", "must be a number"),
        ("sandbox_mode=7", "^-c sandbox_mode: `sandbox_mode` must be a text$"),
        ("sandbox_mode=yolo", "^-c sandbox_mode: `sandbox_mode` must be one of"),
        ("mcp_servers=5", "^-c mcp_servers: `mcp_servers` must be a table$"),
        ("mcp_servers.d.command=5", "^-c mcp_servers.d.command: `command` must be a text$"),
        ("model_provider=zz", "^-c model_provider: `model_provider` is `zz`"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, override: str, said: str) -> None:
    """It is said where the mistake is: here, not in the file."""
    (tmp_path / "config.toml").write_text('model = "a"\n')
    with pytest.raises(BadConfig, match=said):
        load_config(str(tmp_path), {}, [override])


def test_a_mistake_in_the_file_is_not_blamed_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[mcp_servers.d]\ncommand = 5\n")
    with pytest.raises(BadConfig, match=r"config.toml: \[mcp_servers\]: \[d\]: `command` must be a text$"):
        load_config(str(tmp_path), {}, ["mcp_servers.d.required=true"])
