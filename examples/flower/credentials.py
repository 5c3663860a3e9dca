"""Certificates and keys for a trial of Flower with TLS and authenticated SuperNodes.

    python -m examples.flower.credentials 2 runs/flower

writes `ca.pem`, the authority that all trust; `server.pem` and `server.key`, with which
the SuperLink shows that it is 127.0.0.1; and for each SuperNode a private key `node-0`
and its public key `node-0.pub`. For other hosts, have your own authority sign a
certificate with their names, and make each SuperNode's key on its own machine:
`ssh-keygen -t ecdsa -b 384`.
"""

# pyright: reportMissingImports=false

import datetime
import ipaddress
import os
import sys
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as formats
from cryptography.hazmat.primitives.asymmetric import ec


def make(folder: Path, nodes: int, days: int = 30) -> None:
    """Write them into a folder, which is created if it does not exist.

    Args:
      folder: The folder.
      nodes: How many SuperNodes there are.
      days: How long the certificates are valid.
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority, server = _key(), _key()
    name = _name("drjax trial authority")
    ca = _certificate(name, name, authority, authority, days, [
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), False),
    ])  # fmt: skip
    local = ipaddress.IPv4Address("127.0.0.1")
    names = [x509.DNSName("localhost"), x509.IPAddress(local)]
    signed = _certificate(_name("localhost"), name, server, authority, days, [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.SubjectAlternativeName(names), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
         False),
    ])  # fmt: skip
    pem = formats.Encoding.PEM
    (folder / "ca.pem").write_bytes(ca.public_bytes(pem))
    (folder / "server.pem").write_bytes(signed.public_bytes(pem))
    _write_key(folder / "server.key", server, formats.PrivateFormat.PKCS8)
    for i in range(nodes):
        key = _key()
        _write_key(folder / f"node-{i}", key, formats.PrivateFormat.OpenSSH)
        public = key.public_key().public_bytes(
            formats.Encoding.OpenSSH, formats.PublicFormat.OpenSSH
        )
        (folder / f"node-{i}.pub").write_bytes(public)


def _key() -> Any:
    return ec.generate_private_key(ec.SECP384R1())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _certificate(subject, issuer, key, signer, days: int, extensions: list) -> Any:
    now = datetime.datetime.now(datetime.UTC)
    certificate = x509.CertificateBuilder(
        issuer, subject, key.public_key(), x509.random_serial_number(),
        now - datetime.timedelta(hours=1), now + datetime.timedelta(days=days),
    )  # fmt: skip
    for extension, critical in extensions:
        certificate = certificate.add_extension(extension, critical)
    return certificate.sign(signer, hashes.SHA256())


def _write_key(path: Path, key: Any, encoding: formats.PrivateFormat) -> None:
    """Write a private key for its owner alone."""
    data = key.private_bytes(formats.Encoding.PEM, encoding, formats.NoEncryption())
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)


if __name__ == "__main__":
    make(Path(sys.argv[2]), int(sys.argv[1]))
