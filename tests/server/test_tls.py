"""HTTPS, and certificates that cannot be used."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from test_serve import ServerProcess

from cardan.config import ServerConfig
from cardan.errors import ConfigError
from cardan.server.serve import check_tls


def certificate(folder: Path, *options: str) -> tuple[str, str]:
    """A certificate of one's own for 127.0.0.1."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-keyout", str(key), "-out", str(cert), "-days", "2"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", *options]
    subprocess.run(command, check=True, capture_output=True)
    return str(cert), str(key)


@pytest.mark.parametrize("password", [None, "secret"])
def test_https(tmp_path: Path, password: str | None) -> None:
    cert, key = certificate(tmp_path, *(("-passout", f"pass:{password}") if password else ("-nodes",)))
    files = {"ssl_certfile": cert, "ssl_keyfile": key, "ssl_keyfile_password": password}
    server = ServerProcess(server=files)
    try:
        server.wait_ready()
        assert server.url.startswith("https://127.0.0.1:")
        with httpx.Client(base_url=server.url, verify=ssl.create_default_context(cafile=cert)) as client:
            assert client.post("/generate", json={"text": "x"}).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/health", timeout=5)
    finally:
        server.close()


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "-passout", "pass:secret")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nothing")
    for settings in (
        {"ssl_certfile": cert, "ssl_keyfile": key},
        {"ssl_certfile": cert, "ssl_keyfile": key, "ssl_keyfile_password": "wrong"},
        {"ssl_certfile": cert},
        {"ssl_certfile": str(nonsense), "ssl_keyfile": key},
        {"ssl_certfile": str(tmp_path / "missing.pem")},
    ):
        with pytest.raises(ConfigError, match="The certificate cannot be used") as caught:
            check_tls(ServerConfig(**settings))
        assert "secret" not in str(caught.value)
        assert "Both must be PEM files that belong together" in str(caught.value)
    with pytest.raises(ConfigError, match="have no effect without --ssl-certfile"):
        check_tls(ServerConfig(ssl_keyfile=key))
