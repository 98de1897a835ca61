"""Signatures: Amazon's own example, and two that the reference made."""

from __future__ import annotations

import calendar
import time
from pathlib import Path

import pytest

from exec_server.relay.sigv4 import AwsCredentials, NoAwsCredentials, find_credentials, find_region, sign

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
EXAMPLE = AwsCredentials("AKIDEXAMPLE", SECRET)
WITH_TOKEN = AwsCredentials("AKIDEXAMPLE", SECRET, "tok")


def at(stamp: str) -> float:
    return float(calendar.timegm(time.strptime(stamp, "%Y%m%dT%H%M%SZ")))


@pytest.mark.parametrize(
    ("credentials", "service", "method", "url", "headers", "body", "stamp", "names", "signature"),
    [
        (
            *(EXAMPLE, "service", "GET", "https://example.amazonaws.com/", {}, b"", "20150830T123600Z"),
            "host;x-amz-date",
            "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31",
        ),
        (
            *(WITH_TOKEN, "execute-api", "POST"),
            "http://127.0.0.1:44711/base/cloud/environment/env-1/direct/register",
            {"content-type": "application/json"},
            *(b'{"transport":"direct_jsonrpc_v1"}', "20261116T002629Z"),
            "content-type;host;x-amz-date;x-amz-security-token",
            "1cb3d684b8f7af5e67ae193bce25bcab046e841fca36710921735ea4a7429e28",
        ),
        (
            *(WITH_TOKEN, "execute-api", "GET", "ws://127.0.0.1:40409/ws/x%20y?b=%20c&a=1", {}, b""),
            *("20261116T002708Z", "host;x-amz-date;x-amz-security-token"),
            "1143b5a31a413b78a1b57ab7843c7679a569ce57784fb5321df53c92f6c0a02b",
        ),
    ],
    ids=["Amazon's example", "the reference registers", "the reference connects"],
)
def test_known_signatures(
    credentials: AwsCredentials,
    service: str,
    method: str,
    url: str,
    headers: dict[str, str],
    body: bytes,
    stamp: str,
    names: str,
    signature: str,
) -> None:
    signed = sign(credentials, "us-east-1", service, method, url, headers, body, at(stamp))
    assert signed["authorization"] == (
        f"AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/{stamp[:8]}/us-east-1/{service}/aws4_request,"
        f" SignedHeaders={names}, Signature={signature}"
    )
    assert signed["x-amz-date"] == stamp
    assert "host" not in signed


def test_where_credentials_come_from(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text(
        "[default]\naws_access_key_id=D\naws_secret_access_key=d%\n[other]\naws_access_key_id = O\n"
    )
    config = tmp_path / "config"
    config.write_text("[default]\nregion = eu-west-1\n[profile other]\nregion=us-west-2\n")
    files = {"AWS_SHARED_CREDENTIALS_FILE": str(file), "AWS_CONFIG_FILE": str(config)}
    variables = {**files, "AWS_ACCESS_KEY_ID": "V", "AWS_SECRET_ACCESS_KEY": "v", "AWS_SESSION_TOKEN": "t"}
    assert find_credentials(None, variables) == AwsCredentials("V", "v", "t")
    assert find_credentials(None, files) == AwsCredentials("D", "d%")
    assert find_credentials("default", variables) == AwsCredentials("D", "d%")
    for profile in ("other", "missing"):
        with pytest.raises(NoAwsCredentials, match=profile):
            find_credentials(profile, variables)
    assert find_region("given", None, {**files, "AWS_REGION": "x"}) == "given"
    assert find_region(None, None, {**files, "AWS_REGION": "x"}) == "x"
    assert find_region(None, None, files) == "eu-west-1"
    assert find_region(None, "other", files) == "us-west-2"
    with pytest.raises(NoAwsCredentials, match="--aws-region"):
        find_region(None, "missing", files)
    file.write_text("no section\n")
    with pytest.raises(NoAwsCredentials, match="cannot be read"):
        find_credentials(None, files)
