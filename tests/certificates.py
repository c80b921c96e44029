"""Certificates for tests, made by the program openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_authority(folder: Path, *, sloppy: bool = False) -> Path:
    """Make the certificate and key of a new CA in `folder`; return the certificate's path.

    A sloppy one has no key usage, as many home-made ones.
    """
    folder.mkdir()
    # RFC 5280 asks for these extensions; Python 3.13 checks them.
    extensions = [] if sloppy else ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    subject = ("-subj", "/CN=authority")
    _openssl("req", "-x509", *_new_key(folder / "ca.key"), *subject, *extensions, "-out", f"{folder}/ca.pem")
    return folder / "ca.pem"


def make_certificate(authority: Path, folder: Path, *addresses: str) -> dict[str, str]:
    """Make a certificate and key that the CA has signed; return Ray's settings of TLS with them.

    Ray itself, unlike raylane, compares `addresses` with those that it connects to.
    """
    folder.mkdir()
    signing = ("-CA", str(authority), "-CAkey", str(authority.with_suffix(".key")))
    names = folder / "names"
    hosts = ", ".join(["DNS:localhost", *(f"IP:{address}" for address in ("127.0.0.1", *addresses))])
    names.write_text(
        f"subjectAltName = {hosts}\nbasicConstraints = critical,CA:FALSE\nkeyUsage = critical,digitalSignature\n"
        "subjectKeyIdentifier = hash\nauthorityKeyIdentifier = keyid\n"
    )
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
