"""Certificates for tests, made by the program openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_authority(folder: Path) -> Path:
    """Make the certificate and key of a new CA in `folder`; return the certificate's path."""
    folder.mkdir()
    _openssl("req", "-x509", *_new_key(folder / "ca.key"), "-subj", "/CN=authority", "-out", f"{folder}/ca.pem")
    return folder / "ca.pem"


def make_certificate(authority: Path, folder: Path, *addresses: str) -> dict[str, str]:
    """Make a certificate and key that the CA has signed; return Ray's settings of TLS with them.

    Ray itself, unlike raylane, compares `addresses` with those that it connects to.
    """
    folder.mkdir()
    signing = ("-CA", str(authority), "-CAkey", str(authority.with_suffix(".key")))
    names = folder / "names"
    names.write_text(", ".join(["subjectAltName = DNS:localhost", *(f"IP:{one}" for one in ("127.0.0.1", *addresses))]))
    _openssl("req", *_new_key(folder / "key.pem"), "-subj", "/CN=node", "-out", f"{folder}/request")
    _openssl(
        "x509", "-req", "-in", f"{folder}/request", *signing, "-CAcreateserial", "-extfile", str(names), "-out",
        f"{folder}/cert.pem",
    )  # fmt: skip
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": f"{folder}/cert.pem",
        "RAY_TLS_SERVER_KEY": f"{folder}/key.pem",
        "RAY_TLS_CA_CERT": str(authority),
    }


def _new_key(path: Path) -> tuple[str, ...]:
    return "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(path)


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)
